"""`pytest --nbval`, the command of the course, on a small course of its own."""

import importlib.util
import itertools
import shutil
import time

import pytest
from toy_course import ANSWERS, HOME, LESSON, course, executed_toy, git, run, write_answer

from course.notebooks import as_text, read_notebook, write_notebook

pytestmark = pytest.mark.course

NOTEBOOK, SOLUTION = "notebooks/01_boxes.ipynb", "solutions/01_boxes.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A toy with solutions that have outputs, under git; tests that change it take a copy."""
    return executed_toy(tmp_path_factory.getbasetemp())


@pytest.fixture
def toy(executed, tmp_path):
    return shutil.copytree(executed, tmp_path / "toy")


def nbval(folder, *arguments: str, code: int) -> str:
    """What `pytest --nbval` prints in the toy; without plugins that only take time to load."""
    command = ["-m", "pytest", "-p", "nbval.plugin", "--nbval", "-q", *arguments]
    return run(folder, *command, code=code, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1").stdout


def exercises_of(text: str, file: str) -> dict[str, str]:
    """word -> names, as the end of the report has them for a file."""
    lines = text.split(f"\n{file}\n")[1].split("\n")
    rows = list(itertools.takewhile(lambda line: line.startswith("    "), lines))
    return {row[4:19].strip(): row[19:] for row in rows}


def answer_in(folder, cell_id: str, source: str) -> None:
    """Write an answer into a build cell and save, as a learner does."""
    nb = read_notebook(folder / NOTEBOOK)
    cell = next(cell for cell in nb.cells if cell.id == cell_id)
    cell.source = cell.source.split("\n")[0] + "\n" + source
    write_notebook(folder / NOTEBOOK, as_text(nb))


def test_a_clean_checkout_passes_and_stays_clean(executed):
    """Tests and solutions are collected, blank notebooks are not; the map ends the report."""
    text = nbval(executed, code=0)
    assert "11 passed" in text  # 3 tests and 8 cells
    assert exercises_of(text, SOLUTION) == {
        "passed": "boxes.boxes_for, boxes.Shelf.take, boxes.Shelf.give"
    }
    last = text[text.index(SOLUTION) :]
    assert "copies of the package. The package itself:\n01 boxes  □□□  0 of 3 yours" in last
    assert git(executed, "status", "--porcelain") == ""


def test_a_blank_notebook_fails_with_exactly_its_exercises(executed):
    """By name, in the course's words; all other cells pass."""
    text = nbval(executed, "notebooks/", code=1)
    assert "3 failed, 5 passed" in text
    assert exercises_of(text, NOTEBOOK) == {
        "open": "boxes.boxes_for, boxes.Shelf.take, boxes.Shelf.give"
    }
    assert "Open: boxes.boxes_for is still borrowed" in text
    assert "Traceback" not in text and "Notebook cell execution failed" not in text
    assert git(executed, "status", "--porcelain") == ""


def test_a_notebook_with_conflict_markers_fails_alone(toy):
    """After a merge; the tests and the solutions run all the same."""
    notebook = toy / NOTEBOOK
    notebook.write_text("<<<<<<< HEAD\n" + notebook.read_text("utf-8"), "utf-8")
    text = nbval(toy, "tests", "solutions", "notebooks", code=1)
    assert "11 passed, 1 error" in text and NOTEBOOK in text


def test_a_worked_notebook_is_checked_on_its_own_answers(toy):
    """One right, one wrong, one open; the tree is not changed by checking it."""
    answer_in(toy, "build-boxes-boxes_for", ANSWERS["boxes.boxes_for"])
    wrong = "def take(self, num_boxes):\n    return self.free[:num_boxes]\n\ndef give(self, b): ..."
    answer_in(toy, "build-boxes-Shelf-take", wrong)
    text = nbval(toy, "notebooks/", code=1)
    assert exercises_of(text, NOTEBOOK) == {
        "passed": "boxes.boxes_for",
        "open": "boxes.Shelf.give",
        "not right yet": "boxes.Shelf.take",
    }
    assert "likely    are the boxes still free?" in text
    assert git(toy, "status", "--porcelain").split() == ["M", NOTEBOOK]


def test_with_a_learners_code_the_tests_run_on_it_and_the_solutions_on_ours(toy):
    """Both in the one bare command; the map shows what is theirs."""
    write_answer(toy, "boxes.Shelf.take", "def take(self, n):\n    return self.free[:n]")
    text = nbval(toy, code=1)
    assert "1 failed, 10 passed" in text
    assert exercises_of(text, "tests/test_boxes.py") == {
        "passed": "boxes.boxes_for, boxes.Shelf.give",
        "not right yet": "boxes.Shelf.take",
    }
    assert list(exercises_of(text, SOLUTION)) == ["passed"]
    assert "01 boxes  □◧□" in text


def test_only_tagged_outputs_are_compared(toy):
    """A saved notebook must pass with other figures, times and progress bars in it."""
    nb = read_notebook(toy / SOLUTION)
    for cell in nb.cells:
        for output in cell.get("outputs", ()):
            output.update({"data": {"text/plain": "?"}} if "data" in output else {"text": "?"})
    write_notebook(toy / SOLUTION, as_text(nb))
    text = nbval(toy, "solutions/", code=1)
    assert "1 failed, 7 passed" in text
    assert "Cell outputs differ" in text and "pack(Shelf(8), 9)" in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(0)", "The kernel died in this cell"),
        pytest.param("while True: pass", "Timeout of 3 seconds exceeded", marks=pytest.mark.slow),
    ],
)
def test_a_cell_that_ends_or_never_ends_is_noticed_soon(toy, code, words):
    """What comes after it did not run, and is not called wrong."""
    lesson = LESSON.replace("pack(Shelf(8), 9)", code)
    (toy / "course/lessons/01_boxes.md").write_text(lesson, "utf-8")
    course(toy, "build")
    start = time.monotonic()
    text = nbval(toy, "solutions/", "--nbval-cell-timeout", "3", code=1)
    assert time.monotonic() - start < 60  # nbval alone waits for 2,000 s
    assert words in text
    assert exercises_of(text, SOLUTION) == {
        "passed": "boxes.boxes_for",
        "not run": "boxes.Shelf.take, boxes.Shelf.give",
    }


# -- the words, without running anything -------------------------------------------------------


@pytest.fixture(scope="module")
def plugin():
    """The root's conftest.py as a module."""
    spec = importlib.util.spec_from_file_location("root_conftest", HOME / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_workers_of_xdist_split_no_notebook(plugin):
    """The cells of a notebook share one kernel."""

    class Config:
        class option:
            dist = "load"

    plugin.pytest_configure(Config)
    assert Config.option.dist == "loadfile"


def test_each_chapter_has_its_gates_on_a_worker_of_its_own(plugin):
    """One file with minutes of work would keep one worker while the others have nothing to do."""

    class Config:
        class option:
            dist = "loadfile"

        def getvalue(self, name):
            return ["2*popen"]

    unit = plugin.pytest_xdist_make_scheduler(Config(), None)._split_scope
    gates, notebook = "tests/test_course_chapters.py::test_x", "solutions/00_tour.ipynb"
    assert (HOME / plugin.GATES).exists()
    assert unit(f"{gates}[00_tour]") != unit(f"{gates}[01_tokenizer]")
    assert unit(f"{notebook}::Cell 1") == unit(f"{notebook}::Cell 2") == notebook
    Config.option.dist = "no"
    assert plugin.pytest_xdist_make_scheduler(Config(), None) is None


class Item:
    """A collected test with these markers."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.get_closest_marker = nodeid, lambda name: name in marks


def test_what_takes_long_does_not_come_last(plugin):
    """One worker would be busy with it while the others have nothing left to do."""
    cell = Item("solutions/11_engine.ipynb::Cell 1")
    cell.cell = None
    gate, quick = Item(f"{plugin.GATES}::test_x[00_tour]", "course"), Item("tests/test_x.py::test")
    longer = [Item("tests/test_x.py::test", name) for name in ("long", "model")]
    assert [plugin.rank(item) for item in (cell, gate, *longer, quick)] == [0, 0, 1, 1, 2]


class Report:
    """Of one test or cell."""

    def __init__(self, longrepr=None, names=(), nodeid="notebooks/01.ipynb::Cell 1", when="call"):
        self.longrepr, self.nodeid, self.when = longrepr, nodeid, when
        self.user_properties = [("exercise", name) for name in names]


@pytest.mark.parametrize(
    ("outcome", "longrepr", "word"),
    [
        ("passed", None, "passed"),
        ("failed", "Open: pool.take is still a hole", "open"),
        ("failed", "E   NotImplementedError: notebook 01: pool.take", "open"),
        ("failed", "✗ take: takes from the front", "not right yet"),
        ("error", "fixture", "not right yet"),
        ("xfailed", "Previous cell timed out", "not run"),
        ("skipped", "no GPU", "not run"),
        ("failed", "pytest plugin exception: Kernel dead on test start", "not run"),
    ],
)
def test_each_outcome_has_its_word(plugin, outcome, longrepr, word):
    """Also those of cells that never ran."""
    assert plugin.word(outcome, Report(longrepr)) == word


def test_the_worst_of_several_tests_counts(plugin):
    """One exercise has many tests, and set-up and take-down have reports too."""
    stats = {
        "passed": [Report(names=["a", "b"]), Report(names=["a"])],
        "failed": [Report("✗", names=["a"])],
        "": [Report(names=["b"], when="setup")],
    }
    assert plugin.exercise_words(stats) == {
        "notebooks/01.ipynb": {"a": "not right yet", "b": "passed"}
    }


def test_a_test_file_in_which_all_is_well_is_not_listed(plugin):
    """A notebook always is."""
    assert plugin.file_lines("tests/test_a.py", {"a": "passed"}) == []
    assert plugin.file_lines("01.ipynb", {"a": "passed", "b": "passed"}) == [
        "01.ipynb",
        "    passed         a, b",
    ]


def test_deselected_tests_are_no_reports(plugin):
    """`pytest -k ...` leaves exercises out; the summary says nothing of those."""
    deselected = type("Item", (), {"user_properties": [("exercise", "a.b")]})()
    assert plugin.exercise_words({"deselected": [deselected]}) == {}
