"""Lessons and package become notebooks: the same each time, and never over a learner's work."""

import json
import shutil
from pathlib import Path

import pytest
from toy_course import ANSWERS, LESSON, PACKAGE, course, executed_toy, git, write_answer

from course.authoring import build
from course.files import CourseError
from course.notebooks import as_text as text_of
from course.notebooks import is_edited, new_cell, read_notebook, write_notebook

pytestmark = pytest.mark.course

NOTEBOOK, SOLUTION = "notebooks/01_boxes.ipynb", "solutions/01_boxes.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A toy that is built and executed; tests that change it take a copy."""
    return executed_toy(tmp_path_factory.getbasetemp())


@pytest.fixture
def toy(executed, tmp_path):
    return shutil.copytree(executed, tmp_path / "toy")


def cells_of(folder: Path, solved: bool, lesson: str = LESSON):
    """The cells that the toy's package gives with this lesson."""
    path = folder / "lesson.md"
    path.write_text(lesson, "utf-8")
    return build.lesson_cells(path, folder / "minivllm", solved)


def renew(folder: Path, solved: bool, lesson: str = LESSON) -> str:
    path = folder / (SOLUTION if solved else NOTEBOOK)
    return build.renew(path, cells_of(folder, solved, lesson), solved)


# -- cells -------------------------------------------------------------------------------------


def test_a_hole_keeps_signature_and_docstring_and_nothing_of_the_body(toy):
    """What says how, comments included, is gone; solving only adds lines."""
    cells = {cell.id: cell for cell in cells_of(toy, solved=False)}
    assert cells["build-boxes-boxes_for"].source == (
        "%%build boxes.boxes_for\n"
        "def boxes_for(num_things: int, box_size: int) -> int:\n"
        '    """Boxes that the things fill: `boxes_for(5, 4) == 2`."""\n'
        "    ..."
    )


def test_a_solved_cell_holds_the_functions_of_the_package(toy):
    """Methods stand without their class; functions are two lines apart."""
    cells = {cell.id: cell for cell in cells_of(toy, solved=True)}
    source = cells["build-boxes-Shelf-take"].source
    assert "\ndef take(self, num_boxes: int) -> list[int]:\n" in source
    assert "    return taken\n\n\ndef give(" in source
    assert cells["build-boxes-Shelf-take"].metadata["course"] == {
        "build": ["boxes.Shelf.take", "boxes.Shelf.give"]
    }


def test_both_notebooks_have_the_same_ids_and_each_id_once(toy):
    """An id depends on the lesson alone, also where two cells are equal."""
    lesson = LESSON + "\n```python\nshelf.free\n```\n\n```python\nshelf.free\n```\n"
    blank = [cell.id for cell in cells_of(toy, False, lesson)]
    assert blank == [cell.id for cell in cells_of(toy, True, lesson)]
    assert len(set(blank)) == len(blank)


def test_tags_of_the_lesson_arrive(toy):
    """nbval reads them."""
    cells = cells_of(toy, solved=False)
    tagged = [c.source for c in cells if "nbval-check-output" in c.metadata.get("tags", [])]
    assert tagged == ["pack(Shelf(8), 9)"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("boxes.boxes_fro", "no boxes_fro"),
        ("shelves.take", "shelves.py has no take"),
        ("boxes", "such function"),
        ("boxes.Shelf.take boxes.Other.take", "Give each a cell of its own"),
    ],
)
def test_a_name_that_cannot_be_built_is_refused(toy, names, words):
    """With what to do about it."""
    with pytest.raises(CourseError, match=words):
        cells_of(toy, True, f"```python\n%%build {names}\n```\n")


# -- files -------------------------------------------------------------------------------------


def test_building_again_changes_no_byte(executed):
    """Neither after a build nor after the solutions were run."""
    before = [(executed / name).read_bytes() for name in (NOTEBOOK, SOLUTION)]
    assert course(executed, "build").split()[::2] == ["same", "same"]
    assert [(executed / name).read_bytes() for name in (NOTEBOOK, SOLUTION)] == before


def test_building_from_nothing_gives_the_same_bytes(toy, executed):
    """So a rebuilt checkout is clean."""
    (toy / NOTEBOOK).unlink()
    assert renew(toy, solved=False) == "written"
    assert (toy / NOTEBOOK).read_bytes() == (executed / NOTEBOOK).read_bytes()


@pytest.mark.parametrize("change", ["edit", "add", "delete"])
def test_work_in_a_notebook_is_never_overwritten(toy, change):
    """Whatever the lesson says by now."""
    nb = read_notebook(toy / NOTEBOOK)
    if change == "edit":
        nb.cells[3].source += "\n# mine"
    elif change == "add":
        nb.cells.append(new_cell("code", "1 + 1", "mine", {}))
    else:
        del nb.cells[3]
    write_notebook(toy / NOTEBOOK, text_of(nb))
    before = (toy / NOTEBOOK).read_bytes()
    assert renew(toy, False, LESSON + "\n\nMore.\n") == "kept"
    assert (toy / NOTEBOOK).read_bytes() == before


def test_running_and_saving_a_notebook_is_no_work(toy):
    """Outputs, counts and what Jupyter notes do not keep a new lesson out."""
    nb = read_notebook(toy / NOTEBOOK)
    nb.metadata["language_info"] = {"name": "python", "version": "3.13.1"}
    for cell in nb.cells:
        cell.metadata["trusted"] = True
        if cell.cell_type == "code":
            cell.execution_count = 3
    assert not is_edited(nb)
    write_notebook(toy / NOTEBOOK, text_of(nb))
    assert renew(toy, False) == "same"
    assert renew(toy, False, LESSON + "\n\nMore.\n") == "written"


def test_prose_leaves_outputs_and_code_removes_them(toy):
    """An output that no longer belongs to its code must not stay."""
    assert renew(toy, True, LESSON.replace("# 01 · Boxes", "# 01 · More boxes")) == "written"
    assert any(cell.get("outputs") for cell in read_notebook(toy / SOLUTION).cells)
    assert renew(toy, True, LESSON.replace("Shelf(8)", "Shelf(9)")) == "written"
    assert not any(cell.get("outputs") for cell in read_notebook(toy / SOLUTION).cells)


# -- learner's code ----------------------------------------------------------------------------


def test_build_and_execute_refuse_while_a_learner_is_at_work(toy):
    """Their code must not become the reference; once ours is back, all is as before."""
    write_answer(toy, "boxes.boxes_for", ANSWERS["boxes.boxes_for"])
    before = (toy / SOLUTION).read_bytes()
    for command in (["build"], ["execute", "--all"]):
        text = course(toy, *command, code=1)
        assert "python -m course restore boxes.boxes_for" in text
    assert "skipped" in course(toy, "verify")
    assert (toy / SOLUTION).read_bytes() == before
    (toy / "minivllm" / "boxes.py").write_text(PACKAGE, "utf-8")  # as `git checkout` does
    assert "same" in course(toy, "build")


def test_an_author_may_change_a_function_and_build(toy):
    """The package is the source; nothing says that a learner wrote it."""
    path = toy / "minivllm" / "boxes.py"
    path.write_text(PACKAGE.replace("self.free.append(box)", "self.free += [box]"), "utf-8")
    assert course(toy, "build").split()[::2] == ["same", "written"]
    assert "self.free += [box]" in (toy / SOLUTION).read_text("utf-8")


# -- execute -----------------------------------------------------------------------------------


def test_execute_keeps_outputs_but_no_times_and_no_paths(executed):
    """What changes from run to run or from machine to machine is not kept."""
    text = (executed / SOLUTION).read_text("utf-8")
    nb = json.loads(text)
    outputs = [o for cell in nb["cells"] for o in cell.get("outputs", [])]
    assert {"text/plain": ["[0, 1, 2]"]} in [o.get("data") for o in outputs]
    assert any("✓ boxes_for" in "".join(o.get("text", [])) for o in outputs)
    assert not any("execution" in cell["metadata"] for cell in nb["cells"])
    assert str(executed) not in text and "minivllm-course-" not in text
    assert nb["metadata"]["language_info"] == {"name": "python"}


def test_execute_changes_nothing_but_outputs_and_leaves_the_package_alone(toy):
    """It runs on a copy; a second run gives the same."""
    assert "01_boxes" in course(toy, "execute", "01")
    assert git(toy, "status", "--porcelain") == ""


def test_a_solution_that_fails_keeps_its_old_outputs(toy):
    """And the error names the cell."""
    lesson = toy / "course" / "lessons" / "01_boxes.md"
    lesson.write_text(LESSON + "\n```python\npack(Shelf(0), 7)\n```\n", "utf-8")
    course(toy, "build")
    before = (toy / SOLUTION).read_bytes()
    text = course(toy, "execute", code=1)
    assert "pack(Shelf(0), 7)" in text and "\x1b" not in text
    assert (toy / SOLUTION).read_bytes() == before


def test_a_solution_above_a_megabyte_is_refused():
    """With its size and what to do; a figure of 700 pixels has some 30,000 bytes."""
    build.refuse_large("01_boxes.ipynb", "x" * 1_000_000)
    with pytest.raises(CourseError, match=r"1,000,001 bytes, 1,000,000 are allowed.*smaller"):
        build.refuse_large("01_boxes.ipynb", "x" * 1_000_001)
