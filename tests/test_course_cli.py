"""`python -m course`: what each command does."""

import shutil
import subprocess
import sys

import pytest
from toy_course import ANSWERS, HOME, LESSON, PACKAGE, course, executed_toy, git, run, write_answer

from course.authoring import commands as authors
from course.commands import COMMANDS, main, parser
from course.notebooks import as_text, read_notebook, write_notebook

pytestmark = pytest.mark.course

NOTEBOOK = "notebooks/01_boxes.ipynb"
MODULE = "minivllm/boxes.py"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A toy that is built; tests that change it take a copy."""
    return executed_toy(tmp_path_factory.getbasetemp())


@pytest.fixture
def toy(built, tmp_path):
    return shutil.copytree(built, tmp_path / "toy")


def read(folder, name: str) -> str:
    return (folder / name).read_text("utf-8")


def states(folder) -> str:
    """The boxes of the map: one sign for each exercise."""
    return course(folder, "progress").splitlines()[0].split()[2]


# -- help --------------------------------------------------------------------------------------


ALL = [*COMMANDS, *authors.COMMANDS]


@pytest.mark.parametrize("name", ALL)
def test_every_command_explains_itself(name, capsys):
    """More than a usage line: what it does and what comes after."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert len(text.split("\n\n")[1]) > 40, "the description is missing"


def test_the_list_of_commands_is_complete():
    """Those of the course's plan, in the learner's order first."""
    wanted = "check open restore empty progress update build execute verify new-chapter"
    assert wanted.split() == ALL
    assert all(f"\n    {name}" in parser().format_help() for name in ALL)


def test_learners_commands_import_nothing_of_the_authors():
    """A learner's command starts without jupytext and the gates."""
    script = "import sys; from course.commands import main; main(['progress'])\n"
    script += "print([name for name in sys.modules if 'authoring' in name or name == 'jupytext'])"
    ran = subprocess.run([sys.executable, "-c", script], cwd=HOME, capture_output=True, text=True)
    assert ran.stdout.endswith("[]\n"), ran.stdout[-300:] + ran.stderr


# -- check and open ----------------------------------------------------------------------------


def test_check_says_open_wrong_and_right(toy):
    """Exit code 0 only for what is right."""
    assert "still borrowed" in course(toy, "check", "boxes_for", code=1)
    write_answer(
        toy,
        "boxes.boxes_for",
        "def boxes_for(num_things, box_size):\n    return num_things // box_size",
    )
    assert "do you round down?" in course(toy, "check", "boxes_for", code=1)
    write_answer(toy, "boxes.boxes_for", ANSWERS["boxes.boxes_for"])
    assert "✓ boxes_for" in course(toy, "check", "boxes_for")


def test_check_without_a_name_checks_all_that_is_yours(toy):
    """And says how to begin where nothing is."""
    assert "Nothing is yours yet" in course(toy, "check")
    write_answer(toy, "boxes.boxes_for", ANSWERS["boxes.boxes_for"])
    write_answer(toy, "boxes.Shelf.give", "def give(self, boxes):\n    pass\n    return")
    text = course(toy, "check", code=1)
    assert "✓ boxes_for" in text and "✗ give" in text and "✗ take" not in text


def test_a_wrong_name_is_answered_with_the_right_one(toy):
    """Without a traceback."""
    text = course(toy, "check", "boxs_for", code=1)
    assert "Did you mean boxes.boxes_for?" in text and "Traceback" not in text


def test_open_is_for_the_editor_and_our_own_text_counts_there(toy):
    """The hole raises, the check says open; what is typed is the learner's, be it ours."""
    assert "minivllm/boxes.py" in course(toy, "open", "boxes_for")
    assert 'raise NotImplementedError("notebook 01_boxes: boxes.boxes_for")' in read(toy, MODULE)
    assert "still a hole" in course(toy, "check", "boxes_for", code=1)
    (toy / MODULE).write_text(PACKAGE, "utf-8")
    assert "✓ boxes_for" in course(toy, "check", "boxes_for")
    assert states(toy) == "■□□"


# -- empty and restore -------------------------------------------------------------------------


def test_empty_takes_out_what_is_ours_and_undo_puts_it_back(toy):
    """The learner's own functions stay through both."""
    write_answer(toy, "boxes.Shelf.give", ANSWERS["boxes.Shelf.give"])
    text = course(toy, "empty")
    assert "Removed: 2" in text and "Yours stay: 1" in text and "empty --undo" in text
    assert states(toy) == "··◧"
    assert read(toy, MODULE).count("raise NotImplementedError") == 2
    assert "Put back: 2" in course(toy, "empty", "--undo")
    assert states(toy) == "□□◧"
    course(toy, "restore", "give")
    assert read(toy, MODULE) == PACKAGE


def test_an_emptied_package_can_be_built_up_step_by_step(toy):
    """Each check passes with the later ones still open."""
    course(toy, "empty")
    for name, source in ANSWERS.items():
        write_answer(toy, name, source)
        course(toy, "check", name)
    assert states(toy) == "■■■"


# -- update ------------------------------------------------------------------------------------


@pytest.fixture
def clone(toy, tmp_path):
    """A learner's clone of the toy, with work in it; the toy is where new versions appear."""
    git(tmp_path, "clone", "-q", str(toy), "clone")
    write_answer(tmp_path / "clone", "boxes.boxes_for", ANSWERS["boxes.boxes_for"])
    write_answer(tmp_path / "clone", "boxes.Shelf.give", ANSWERS["boxes.Shelf.give"])
    edit_notebook(tmp_path / "clone")
    return tmp_path / "clone"


def edit_notebook(folder) -> None:
    nb = read_notebook(folder / NOTEBOOK)
    nb.cells[3].source += "\n# my thoughts"
    write_notebook(folder / NOTEBOOK, as_text(nb))


def publish(toy, package: str) -> None:
    """A new version: other code, another lesson, new notebooks."""
    (toy / MODULE).write_text(package, "utf-8")
    (toy / "course/lessons/01_boxes.md").write_text(LESSON + "\n\nMore.\n", "utf-8")
    course(toy, "build")
    git(toy, "commit", "-qam", "two")


def test_update_brings_a_new_version_under_the_learners_work(toy, clone):
    """Functions are laid into the new package, the notebook is kept next to the new one."""
    publish(toy, PACKAGE.replace('"""Boxes of a shelf."""', '"""Boxes, better than before."""'))
    text = course(clone, "update")
    assert "Your code runs in this version: boxes.boxes_for, boxes.Shelf.give" in text
    module = read(clone, MODULE)
    assert "better than before" in module and "Mine." in module and "self.free += boxes" in module
    assert "More." in read(clone, NOTEBOOK) and "my thoughts" not in read(clone, NOTEBOOK)
    assert "my thoughts" in read(clone, "notebooks/01_boxes.mine.ipynb")
    assert states(clone) == "◧□◧"  # to be checked again: the tests may be new
    assert git(clone, "status", "--porcelain").split() == ["M", MODULE]


def test_update_keeps_aside_what_has_no_place_any_more(toy, clone):
    """An exercise that the new version does not have."""
    lesson = LESSON.replace("%%build boxes.boxes_for", "1").replace("%check boxes.boxes_for", "2")
    (toy / "course/lessons/01_boxes.md").write_text(lesson, "utf-8")
    course(toy, "build")
    git(toy, "commit", "-qam", "two")
    assert "no such exercise" in course(clone, "update")
    assert "Mine." in read(clone, ".course/carry/boxes.boxes_for.py")
    assert states(clone) == "□◧"


def test_update_that_git_refuses_leaves_everything_as_it_was(toy, clone):
    """Here because a file of the learner stands where a new one comes."""
    before = read(clone, MODULE), read(clone, NOTEBOOK)
    (toy / "notes.md").write_text("ours", "utf-8")
    git(toy, "add", "notes.md")
    publish(toy, PACKAGE)
    (clone / "notes.md").write_text("mine", "utf-8")
    text = course(clone, "update")
    assert "git pull did not work" in text and "notes.md" in text
    assert (read(clone, MODULE), read(clone, NOTEBOOK)) == before
    (clone / "notes.md").unlink()
    assert "Your code runs" in course(clone, "update")


def test_update_goes_on_after_it_was_stopped_half_way(toy, clone):
    """Stopped when all is put aside and removed, before the new version came."""
    publish(toy, PACKAGE.replace('"""Boxes of a shelf."""', '"""Boxes, better than before."""'))
    script = (
        "from course import update\n"
        "def stop(): raise KeyboardInterrupt\n"
        "update.pull = stop\n"
        "list(update.update())"
    )
    assert "KeyboardInterrupt" in run(clone, "-c", script, code=None).stderr
    assert "Mine." not in read(clone, MODULE)
    course(clone, "update")
    assert "Mine." in read(clone, MODULE) and "better than before" in read(clone, MODULE)
    assert "my thoughts" in read(clone, "notebooks/01_boxes.mine.ipynb")


def test_update_from_another_folder_needs_no_git(toy, built):
    """For those who unpack new versions; the old folder stays as it is."""
    new = shutil.copytree(built, toy.parent / "new")
    write_answer(toy, "boxes.boxes_for", ANSWERS["boxes.boxes_for"])
    edit_notebook(toy)
    old = read(toy, MODULE), read(toy, NOTEBOOK)
    assert "Your code runs in this version: boxes.boxes_for" in course(
        new, "update", "--from", str(toy)
    )
    assert "Mine." in read(new, MODULE)
    assert "my thoughts" in read(new, "notebooks/01_boxes.mine.ipynb")
    assert (read(toy, MODULE), read(toy, NOTEBOOK)) == old
    assert "holds no minivllm/" in course(new, "update", "--from", str(toy.parent), code=1)


# -- authors -----------------------------------------------------------------------------------


def test_new_chapter_writes_a_skeleton_that_builds(toy):
    """With the module's public functions as exercises, and never over a lesson that exists."""
    text = course(toy, "new-chapter", "02", "bags", "boxes")
    assert "course/lessons/02_bags.md" in text and "course/mistakes/02_bags.py" in text
    lesson = read(toy, "course/lessons/02_bags.md")
    assert lesson.startswith("# 02 · Bags\n") and "%%build boxes.Shelf.take" in lesson
    assert "__init__" not in lesson
    assert "written  notebooks/02_bags.ipynb" in course(toy, "build")
    assert "exists" in course(toy, "new-chapter", "02", "bags", "boxes", code=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["2", "bags", "boxes"], "two digits"), (["02", "bags", "bag"], "bag.py does not exist")],
)
def test_new_chapter_refuses_what_it_cannot_build(toy, arguments, words):
    """And says what comes first."""
    assert words in course(toy, "new-chapter", *arguments, code=1)


def test_execute_and_verify_know_chapters_by_number(toy):
    """A wrong one is answered with those that exist."""
    for command in ("execute", "verify"):
        assert "There are: 01_boxes" in course(toy, command, "07", code=1)
