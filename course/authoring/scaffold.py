"""The skeleton of a new chapter, in the form that all chapters share."""

from __future__ import annotations

import ast
from pathlib import Path

from course import files, splice
from course.files import read

MAX_CANDIDATES = 6  # exercises of a chapter, at most

TEMPLATES = Path(__file__).parent / "templates"


def new_chapter(number: str, name: str, module: str, home: Path) -> list[Path]:
    """Write the lesson and the file of wrong answers; returns both paths."""
    if not (number.isdigit() and len(number) == 2):
        raise files.CourseError(f"number={number!r} must have two digits, as in 04.")
    names = candidates(module, home)
    chapter = f"{number}_{name}"
    lesson = home / "course" / "lessons" / f"{chapter}.md"
    mistakes = home / "course" / "mistakes" / f"{chapter}.py"
    for path in (lesson, mistakes):
        if path.exists():
            raise files.CourseError(f"{path} exists. Choose another number or name, or delete it.")
    short = names[0].rsplit(".", 1)[-1]
    title = name.replace("_", " ").capitalize()
    one = read(TEMPLATES / "exercise.md")
    exercises = "".join(one.format(name=n, short=n.split(".", 1)[1]) for n in names)
    words = {"number": number, "name": chapter, "title": title, "module": module}
    lesson.write_text(read(TEMPLATES / "lesson.md").format(**words, exercises=exercises), "utf-8")
    text = read(TEMPLATES / "mistakes.txt").format(**words, first=names[0], short=short)
    mistakes.write_text(text, "utf-8")
    return [lesson, mistakes]


def candidates(module: str, home: Path) -> list[str]:
    """The first public functions and methods of a module, helpers first."""
    path = home / "minivllm" / f"{module}.py"
    if not path.exists():
        raise files.CourseError(
            f"minivllm/{module}.py does not exist. Write the finished module first: the notebook"
            " is made from it. Its name is given without folder and ending, as in prefix_cache."
        )
    names = []
    for node in ast.parse(read(path)).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{module}.{node.name}." if isinstance(node, ast.ClassDef) else f"{module}."
        written = (n for n in inside if isinstance(n, ast.FunctionDef) and not splice.is_hole(n))
        names += [prefix + n.name for n in written if not n.name.startswith("_")]
    public = list(dict.fromkeys(names))  # a property and its setter are one exercise
    if not public:
        raise files.CourseError(f"minivllm/{module}.py has no public function to build.")
    return sorted(public, key=lambda name: name.count("."))[:MAX_CANDIDATES]
