"""The gates: what must hold of the chapters. One function each, given the names of chapters.

Each returns its problems, and each problem says how to repair it. Gates 2 to 5 run code, on
sandboxes; what they promise is itself tested with planted faults (`tests/test_course_gates.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from course import exercises as ex
from course import files, sandbox
from course.authoring.build import lesson_cells
from course.authoring.gates_pages import page_problems
from course.authoring.gates_wheel import environment_problems, wheel_problems
from course.authoring.mistakes import Mistake, read_mistakes
from course.check import run_tests
from course.notebooks import Cell, is_executed, read_notebook, same_source
from course.verdict import verdict

Problems = list[str]

TRY_LIMIT = 5  # seconds for one test of a wrong answer: some never end


def notebook(folder: str, chapter: str) -> Path:
    """Where a notebook of a chapter lies."""
    return files.HOME / folder / f"{chapter}.ipynb"


def exercises_of(chapters: Iterable[str]) -> list[ex.Exercise]:
    """The exercises of some chapters, in course order."""
    return [exercise for exercise in ex.exercises().values() if exercise.notebook in chapters]


def in_parallel(work: Callable[[Any], Problems], things: list[Any]) -> Problems:
    """The problems of all things; each starts processes of its own, so threads are enough."""
    with sandbox.one_thread_each(), ThreadPoolExecutor(os.cpu_count()) as pool:
        return [problem for problems in pool.map(work, things) for problem in problems]


# -- 1 -----------------------------------------------------------------------------------------


def same_again(chapters: list[str]) -> Problems:
    """Regenerating changes no source."""
    problems = []
    known = set()
    for lesson in sorted((files.HOME / "course" / "lessons").glob("*.md")):
        for folder, solved in (("notebooks", False), ("solutions", True)):
            path = notebook(folder, lesson.stem)
            known.add(path)
            if lesson.stem in chapters or not path.exists():
                problems += stale(
                    path, lesson_cells(lesson, files.HOME / "minivllm", solved), solved
                )
    there = {p for f in ("notebooks", "solutions") for p in (files.HOME / f).glob("*.ipynb")}
    orphans = sorted(p for p in there - known if not p.name.endswith(".mine.ipynb"))
    return problems + [
        f"{path.relative_to(files.HOME)} has no lesson: delete it, or write course/lessons/"
        f"{path.stem}.md"
        for path in orphans
    ]


def stale(path: Path, cells: list[Cell], solved: bool) -> Problems:
    """What is wrong with one generated notebook."""
    name = path.relative_to(files.HOME)
    if not path.exists():
        return [f"{name} is missing: python -m course build"]
    nb = read_notebook(path)
    if not same_source(nb.cells, cells):
        return [
            f"{name} is not what the lesson and the package give: python -m course build\n"
            f'If that says "kept", the file was edited by hand: move the change into the lesson, '
            "delete the file, build again"
        ]
    if solved and not is_executed(nb):
        return [f"{name} has no outputs: python -m course execute {path.stem}"]
    if not solved and any(cell.get("outputs") for cell in nb.cells):
        return [f"{name} carries outputs: delete it and run python -m course build"]
    return []


# -- 2 -----------------------------------------------------------------------------------------


def rebuilds(chapters: list[str]) -> Problems:
    """Solved cells rebuild the package byte for byte, and the whole solution runs green."""
    jobs = [(job, chapter) for chapter in chapters for job in (rebuild_one, run_whole)]
    return in_parallel(lambda job: job[0](job[1]), jobs)


def rebuilds_cells(chapters: list[str]) -> Problems:
    """Solved cells rebuild the package byte for byte."""
    return in_parallel(rebuild_one, chapters)


def rebuild_one(chapter: str) -> Problems:
    """Only build and check cells, on a package without this chapter's functions and later ones."""
    nb = read_notebook(notebook("solutions", chapter))
    nb.cells = [c for c in nb.cells if "course" in c.metadata or c.source.startswith("%load_ext")]
    with sandbox.temporary(reference=True) as folder:
        sandbox.take_out(folder, lambda exercise: exercise.notebook >= chapter)
        try:
            sandbox.run_notebook(nb, folder, notebook("solutions", chapter).parent)
        except files.CourseError as error:
            return [
                f"{chapter}: the solved build and check cells fail on a package without its"
                " functions and those of later chapters. Repair the function in minivllm/ or its"
                f" test, build again; python -m course verify --gate 5 {chapter} says whether it"
                f" needs a later exercise.\n{error}"
            ]
        later = [e for e in ex.exercises().values() if e.notebook > chapter]
        sandbox.set_sources(folder, {e.name: e.reference for e in later})
        return different_files(chapter, folder)


def different_files(chapter: str, folder: Path) -> Problems:
    """The modules that did not come back as they are in the tree."""
    paths = sorted((files.root() / "minivllm").rglob("*.py"))
    return [
        f"{chapter}: its build cells do not give {path.relative_to(files.root())} back byte for"
        " byte. Was a function edited since the last build? Run python -m course build; else look"
        " at its layout"
        for path in paths
        if path.read_bytes() != (folder / path.relative_to(files.root())).read_bytes()
    ]


def run_whole(chapter: str) -> Problems:
    """The whole solution, on the whole package."""
    path = notebook("solutions", chapter)
    with sandbox.temporary(reference=True) as folder:
        try:
            sandbox.run_notebook(read_notebook(path), folder, path.parent)
        except files.CourseError as error:
            return [f"{chapter}: the solution does not run. Repair this cell:\n{error}"]
    return []


# -- 3 -----------------------------------------------------------------------------------------


def blank_runs(chapters: list[str]) -> Problems:
    """The blank notebook runs through; each check in it is open, and nothing else fails."""
    return in_parallel(blank_one, chapters)


def blank_one(chapter: str) -> Problems:
    """The cells that fail must be the check cells, each with the course's own error."""
    path = notebook("notebooks", chapter)
    nb = read_notebook(path)
    with sandbox.temporary(reference=True) as folder:
        sandbox.run_notebook(nb, folder, path.parent, allow_errors=True)
    problems = []
    for cell in nb.cells:
        error = next((o for o in cell.get("outputs", ()) if o.output_type == "error"), None)
        name = error.ename if error else None
        if "check" in cell.metadata.get("course", {}):
            if name != files.OpenExercise.__name__:
                problems.append(
                    f"{chapter}: `{cell.source}` must say that it is open before anything is"
                    f" built, but {name or 'it passes'}. Is a build cell without its hole?"
                )
        elif error:
            problems.append(
                f"{chapter}: this cell fails in the blank notebook. It must run on our functions"
                f" before the reader has built any:\n{cell.source}\n{name}: {error.evalue}"
            )
    return problems


# -- 4 -----------------------------------------------------------------------------------------


def mistakes_caught(chapters: list[str]) -> Problems:
    """Every wrong answer of the library fails its check with the words meant for it."""
    library: dict[str, list[Mistake]] = {e.name: [] for e in exercises_of(chapters)}
    problems = []
    for chapter in chapters:
        file = f"course/mistakes/{chapter}.py"
        for mistake in read_mistakes(files.HOME / file):
            if mistake.name in library:
                library[mistake.name].append(mistake)
            else:
                problems.append(f"{file}: {mistake.name} is not its exercise: correct the name")
    problems += [
        f"{name} has no wrong answer. Add one that people give to course/mistakes/"
        for name, mistakes in library.items()
        if not mistakes
    ]
    tried = [mistake for mistakes in library.values() for mistake in mistakes]
    return problems + in_parallel(uncaught, tried)


def uncaught(mistake: Mistake) -> Problems:
    """Whether the check fails with the right words, on a package that holds the wrong answer."""
    with sandbox.temporary(reference=True) as folder:
        sandbox.set_sources(folder, {mistake.name: mistake.source})
        ok, text = verdict(mistake.name, run_tests(mistake.name, folder, TRY_LIMIT), folder)
    if not ok and mistake.says in text:
        return []
    return [
        f"{mistake.name}: the check does not say {mistake.says!r} to this wrong answer. Add or"
        f" sharpen a test in tests/test_{mistake.name.split('.')[0]}.py whose assert message is"
        f" these words:\n{mistake.source.strip()}\nIt says:\n{text}"
    ]


# -- 5 -----------------------------------------------------------------------------------------


def staircase(chapters: list[str]) -> Problems:
    """Exercise by exercise: with all later ones still open, its check passes."""
    return in_parallel(climb, chapters)


def climb(chapter: str) -> Problems:
    """The steps of one chapter, on a package that lacks its exercises and those of later ones."""
    problems = []
    with sandbox.temporary(reference=True) as folder:
        sandbox.take_out(folder, lambda exercise: exercise.notebook >= chapter)
        for exercise in exercises_of([chapter]):
            sandbox.set_sources(folder, {exercise.name: exercise.reference})
            problems += step_problems(exercise, folder)
    return problems


def step_problems(exercise: ex.Exercise, folder: Path) -> Problems:
    """Whether the exercise, just built, can be checked with nothing later built."""
    ok, text = verdict(exercise.name, run_tests(exercise.name, folder), folder)
    if ok:
        return []
    return [
        f"{exercise.name} cannot be checked before a later exercise is built. Move that one"
        f" up in the lesson, or let the test do without it:\n{text}"
    ]


# -- 6 and 7 -----------------------------------------------------------------------------------


def pages(chapters: list[str]) -> Problems:
    """No answers in notebooks/; every picture has alt text; every link leads somewhere."""
    return page_problems(chapters)


def wheel(chapters: list[str]) -> Problems:
    """The wheel installs and imports without the course; environment.yml agrees with it."""
    return wheel_problems() or environment_problems()


GATES: dict[int, Callable[[list[str]], Problems]] = {
    1: same_again,
    2: rebuilds,
    3: blank_runs,
    4: mistakes_caught,
    5: staircase,
    6: pages,
    7: wheel,
}
