"""A learner in the middle of the course, in the old layout (one flat folder of modules), is carried
over to the new one, where modules are in rooms."""

import json
import shutil

import pytest
from nbformat.v4 import new_markdown_cell
from test_course_learner import ANSWERS as REAL_ANSWERS
from test_course_learner import lay, make_checkout
from test_course_learner import run as run_real
from toy_course import ANSWERS, LESSON, PACKAGE, course, git, make_toy, run, write_answer

from course.notebooks import as_text, read_notebook, write_notebook

pytestmark = pytest.mark.course

NOTEBOOK = "notebooks/01_boxes.ipynb"
FIGURES = 'def draw(boxes):\n    """A picture."""\n    return "#" * len(boxes)\n'
IMPORT = "from minivllm.boxes import Shelf, boxes_for, pack"
OLD, NEW = "from minivllm.figures import draw", "from minivllm.pictures.figures import draw"
MINE = ".mine.ipynb"


@pytest.fixture
def origin(tmp_path):
    """The old version: figures.py lies next to the exercises."""
    folder = make_toy(tmp_path / "origin", lesson=LESSON.replace(IMPORT, f"{IMPORT}\n{OLD}"))
    (folder / "minivllm/figures.py").write_text(FIGURES)
    course(folder, "build")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "flat")
    return folder


@pytest.fixture
def clone(origin, tmp_path):
    """The learner's: one exercise checked, one built, one open; notes, and an answer in a cell."""
    git(tmp_path, "clone", "-q", str(origin), "clone")
    folder = tmp_path / "clone"
    write_answer(folder, "boxes.boxes_for", ANSWERS["boxes.boxes_for"])
    course(folder, "check", "boxes_for")
    write_answer(folder, "boxes.Shelf.take", ANSWERS["boxes.Shelf.take"])
    course(folder, "open", "boxes.Shelf.give")
    nb = read_notebook(folder / NOTEBOOK)
    cells = {cell.id: cell for cell in nb.cells}
    build = cells["build-boxes-boxes_for"]
    build.source = build.source.split("\n")[0] + "\n" + ANSWERS["boxes.boxes_for"]
    rule = next(cell for cell in nb.cells if cell.source.startswith("1. A box"))
    rule.source += " So says the book."
    nb.cells.insert(nb.cells.index(build) + 1, new_markdown_cell("My note."))
    write_notebook(folder / NOTEBOOK, as_text(nb))
    return folder


def move_into_rooms(origin) -> None:
    """The new version: figures.py is in a room, and the lesson imports it from there."""
    room = origin / "minivllm/pictures"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (origin / "minivllm/figures.py").rename(room / "figures.py")
    (origin / "minivllm/boxes.py").write_text(PACKAGE + "\n\nROOMS = True\n")
    (origin / "course/lessons/01_boxes.md").write_text(
        LESSON.replace(IMPORT, f"{IMPORT}\n{NEW}") + "\nMore.\n"
    )
    course(origin, "build")
    git(origin, "add", "-A")
    git(origin, "commit", "-qm", "rooms")


def sources(folder, name: str) -> list[str]:
    return [cell.source for cell in read_notebook(folder / "notebooks" / name).cells]


def test_functions_notes_and_ledger_are_carried_over(origin, clone):
    """The package is the new one with the learner's functions, the cells are the new ones."""
    move_into_rooms(origin)
    text = course(clone, "update")
    assert "Your code runs in this version: boxes.boxes_for, boxes.Shelf.take" in text
    module = (clone / "minivllm/boxes.py").read_text()
    assert "ROOMS" in module and "Mine." in module and "self.free.pop(0)" in module
    assert not (clone / "minivllm/figures.py").exists()
    assert course(clone, "progress").split("\n")[0].split()[2] in ("◧◧·", "◧◧□")
    mine, new = sources(clone, "01_boxes.mine.ipynb"), sources(clone, "01_boxes.ipynb")
    assert any(NEW in source for source in mine) and not any(OLD in source for source in mine)
    assert "1. A box in part is a box. So says the book." in mine
    assert mine[mine.index("My note.") - 1].endswith(ANSWERS["boxes.boxes_for"])
    assert mine[-1].endswith("More.") and set(new) - set(mine) == {
        source for source in new if source.startswith("%%build boxes.boxes_for")
    }
    assert "✓" in course(clone, "check", "boxes_for")


def test_the_carried_notebook_runs(origin, clone):
    """Its imports are those of the new layout; the answer in its build cell is built."""
    move_into_rooms(origin)
    course(clone, "update")
    command = ["-m", "pytest", "--nbval", "-q", f"notebooks/01_boxes{MINE}"]
    text = run(clone, *command, code=1).stdout
    assert "passed         boxes.boxes_for" in text
    assert "ModuleNotFoundError" not in text


def test_the_real_package_takes_over_a_flat_one(tmp_path):
    """`update --from` an old folder whose modules were all in one place."""
    new = make_checkout(tmp_path / "new")
    old = tmp_path / "old"
    shutil.copytree(new, old)
    for path in sorted((old / "minivllm").glob("*/*.py")):
        path.rename(old / "minivllm" / f"{path.parent.name}_{path.name}")
    names = list(REAL_ANSWERS)[:3]
    for name in names:
        lay(old, name, REAL_ANSWERS[name])
    book = json.loads((old / ".course/ledger.json").read_text())
    assert sorted(book) == sorted(names)
    text = run_real(new, "-m", "course", "update", "--from", str(old))
    assert f"Your code runs in this version: {', '.join(names)}." in text
    assert "✓" in run_real(new, "-m", "course", "check", names[0])


def test_an_exercise_whose_module_has_moved_is_kept_and_named(tmp_path):
    """`bench_results.percentile` was the tour's exercise; a ledger may outlive its file."""
    new = make_checkout(tmp_path / "new")
    old = tmp_path / "old"
    (old / "minivllm").mkdir(parents=True)
    (old / ".course").mkdir()
    names = ("bench_results.percentile", "long_gone.function")
    book = {name: {"mine": "opened", "passed": None, "history": []} for name in names}
    (old / ".course/ledger.json").write_text(json.dumps(book))
    answer = "def percentile(values, percent):\n    return sorted(values)[0]"
    (old / "minivllm/bench_results.py").write_text(f'"""Results."""\n\n\n{answer}\n')
    text = run_real(new, "-m", "course", "update", "--from", str(old))
    kept = ".course/carry/bench_results.percentile.py"
    assert f"Kept as {kept}, not laid: this version has no such exercise" in text
    assert (new / kept).read_text() == answer
