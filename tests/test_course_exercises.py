"""Exercises: whose code the package holds, and how the learner's gets in and out of it."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import pytest
from course_tree import tree  # noqa: F401

from course import exercises as ex
from course import files
from course.ledger import digest, learner_code, ledger

BLOCKS_FOR = "block_manager.blocks_for"
ALLOCATE = "block_manager.BlockPool.allocate"
MINE = "def blocks_for(num_tokens, block_size=16):\n    return (num_tokens + 15) // block_size"

pytestmark = [pytest.mark.course, pytest.mark.usefixtures("tree")]


def state_of(name):
    """The state of one exercise."""
    return ex.states()[name]


def module_text():
    """The module with the exercises, as it is now."""
    return files.read(files.module_path(BLOCKS_FOR))


def test_exercises_come_in_course_order():
    """As the cells of the solution notebook have them."""
    assert list(ex.exercises()) == [BLOCKS_FOR, ALLOCATE, "block_manager.BlockPool.free"]
    exercise = ex.exercises()[ALLOCATE]
    assert (exercise.notebook, exercise.module) == ("01_blocks", "block_manager")
    assert exercise.inner == "BlockPool.allocate"
    assert exercise.reference == ex.current(ALLOCATE)


def test_the_root_is_found_without_importing_the_package(tree):  # noqa: F811
    """A package that cannot be imported is found too."""
    (tree / "minivllm" / "__init__.py").write_text("1 / 0")
    assert files.root() == tree


@pytest.mark.parametrize("name", [ALLOCATE, "BlockPool.allocate", "allocate"])
def test_the_last_part_of_a_name_is_enough(name):
    """As long as it is unique."""
    assert ex.find_exercise(name).name == ALLOCATE


@pytest.mark.parametrize(
    "wrong",
    ["blokcs_for", "block_manager.block_for", "scheduler.blocks_for", "block_manager.bloks"],
)
def test_a_wrong_name_is_answered_with_the_right_one(wrong):
    """Did you mean?"""
    with pytest.raises(
        files.CourseError, match=f"{wrong}.*Did you mean .*block_manager.blocks_for"
    ):
        ex.find_exercise(wrong)


def test_a_state_says_whose_text_stands_there():
    """borrowed, open, yours, passed, and borrowed again."""
    exercise = ex.find_exercise(BLOCKS_FOR)
    assert state_of(BLOCKS_FOR) == "borrowed"
    ex.open_in_file(exercise)
    assert state_of(BLOCKS_FOR) == "open"
    ex.lay({BLOCKS_FOR: MINE}, mine=True)
    assert state_of(BLOCKS_FOR) == "yours"
    with ledger() as book:
        book[BLOCKS_FOR]["passed"] = digest(MINE)
    assert state_of(BLOCKS_FOR) == "passed"
    ex.lay({BLOCKS_FOR: exercise.reference}, mine=False)
    assert state_of(BLOCKS_FOR) == "borrowed"


def test_the_same_text_as_ours_counts_if_the_learner_wrote_it():
    """A one-liner comes out the same."""
    reference = ex.find_exercise(BLOCKS_FOR).reference
    ex.lay({BLOCKS_FOR: reference}, mine=True)
    assert state_of(BLOCKS_FOR) == "yours"


def test_a_formatter_does_not_turn_our_code_into_the_learners():
    """Nor comments, nor a docstring: a check would pass with nothing done."""
    path = files.module_path(BLOCKS_FOR)
    text = module_text().replace("-(-num_tokens // block_size)", "(-(-num_tokens//block_size))")
    files.write(path, text.replace("    return (-", "    # rounding up\n    return (-"))
    assert ex.current(BLOCKS_FOR) != ex.find_exercise(BLOCKS_FOR).reference
    assert state_of(BLOCKS_FOR) == "borrowed"


def test_a_formatter_does_not_undo_a_passed_check():
    """The mark belongs to the code."""
    ex.lay({BLOCKS_FOR: MINE}, mine=True)
    with ledger() as book:
        book[BLOCKS_FOR]["passed"] = ex.marks_of(MINE)[0]
    text = module_text()
    assert MINE in text
    files.write(files.module_path(BLOCKS_FOR), text.replace(MINE, MINE + "  # mine"))
    assert state_of(BLOCKS_FOR) == "passed"


def test_our_text_typed_in_an_editor_counts_after_open():
    """The first move of those who work in an editor."""
    before = module_text()
    ex.open_in_file(ex.find_exercise(BLOCKS_FOR))
    assert "notebook 01_blocks: block_manager.blocks_for" in module_text()
    files.write(files.module_path(BLOCKS_FOR), before)
    assert state_of(BLOCKS_FOR) == "yours"


def test_a_change_in_an_editor_is_the_learners():
    """Whether the ledger knows of it or not."""
    path = files.module_path(BLOCKS_FOR)
    files.write(path, module_text().replace("-(-num_tokens // block_size)", "7"))
    assert state_of(BLOCKS_FOR) == "yours"
    assert ex.learner_exercises() == [BLOCKS_FOR]


def test_git_checkout_makes_it_borrowed_again():
    """The ledger keeps digests, no flags."""
    before = module_text()
    ex.lay({BLOCKS_FOR: MINE}, mine=True)
    files.write(files.module_path(BLOCKS_FOR), before)
    assert state_of(BLOCKS_FOR) == "borrowed"


def test_a_passed_check_does_not_outlive_a_change():
    """passed belongs to a text."""
    ex.lay({BLOCKS_FOR: MINE}, mine=True)
    with ledger() as book:
        book[BLOCKS_FOR]["passed"] = digest(MINE)
    ex.lay({BLOCKS_FOR: MINE + " + 0"}, mine=True)
    assert state_of(BLOCKS_FOR) == "yours"


def test_laying_changes_only_what_is_named():
    """All else byte for byte."""
    before, old = module_text(), ex.current(BLOCKS_FOR)
    assert ex.lay({BLOCKS_FOR: MINE}, mine=True) == [BLOCKS_FOR]
    assert module_text() == before.replace(old, MINE)


def test_definitions_are_laid_together_or_not_at_all():
    """One that does not fit keeps the others out, and nothing is recorded."""
    before = module_text()
    with pytest.raises(files.BuildError, match="Not written"):
        ex.lay({BLOCKS_FOR: MINE, ALLOCATE: "x = 1"}, mine=True)
    assert module_text() == before
    with ledger() as book:
        assert learner_code(book) == []


def test_stepping_back_goes_through_the_versions():
    """Each with whose it was."""
    ex.lay({BLOCKS_FOR: MINE}, mine=True)
    ex.lay({BLOCKS_FOR: MINE + " + 0"}, mine=True)
    assert ex.step_back(BLOCKS_FOR) == 1
    assert (ex.current(BLOCKS_FOR), state_of(BLOCKS_FOR)) == (MINE, "yours")
    assert ex.step_back(BLOCKS_FOR) == 0
    assert state_of(BLOCKS_FOR) == "borrowed"
    assert ex.step_back(BLOCKS_FOR) is None


def test_a_file_with_windows_line_ends_keeps_them():
    """Every line, the new ones too."""
    path = files.module_path(BLOCKS_FOR)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert state_of(BLOCKS_FOR) == "borrowed"
    ex.lay({BLOCKS_FOR: MINE}, mine=True)
    data = path.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n")
    ex.step_back(BLOCKS_FOR)
    assert state_of(BLOCKS_FOR) == "borrowed"


def test_a_new_text_of_equal_length_is_never_hidden_by_compiled_code(tmp_path, monkeypatch):
    """Python keeps compiled code by whole seconds and size: 20 changes within one second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "counted.py"
    path.write_text("value = 10")
    for value in range(11, 31):
        files.write(path, f"value = {value}")
        spec = importlib.util.spec_from_file_location("counted", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.value == value
    assert (tmp_path / "__pycache__").exists()


def test_a_module_that_does_not_compile_is_named_with_its_remedy():
    """Line, reason, and the command that helps."""
    path = files.module_path(BLOCKS_FOR)
    path.write_text("def broken(:\n")
    with pytest.raises(
        files.CourseError, match=r"line 1.*\n.*git checkout minivllm/block_manager.py"
    ):
        ex.states()


def test_a_definition_that_is_gone_is_named_with_its_remedy():
    """Renamed in an editor, for instance."""
    path = files.module_path(BLOCKS_FOR)
    files.write(path, module_text().replace("def blocks_for", "def blocks_of"))
    with pytest.raises(files.CourseError, match="blocks_for is gone.*git checkout"):
        ex.current(BLOCKS_FOR)


@pytest.mark.parametrize("rubbish", ["{", "", "[1, 2]", '{"a": 3}', "\x00"])
def test_a_corrupt_ledger_is_kept_aside_and_said(tree, capsys, rubbish):  # noqa: F811
    """The learner's code stays, the next ledger begins empty."""
    ex.lay({BLOCKS_FOR: MINE}, mine=True)
    path = tree / ".course" / "ledger.json"
    path.write_text(rubbish)
    assert state_of(BLOCKS_FOR) == "yours"
    assert "kept as .course/ledger.json.broken-1" in capsys.readouterr().out
    assert (tree / ".course" / "ledger.json.broken-1").read_text() == rubbish
    path.write_text(rubbish)
    ex.states()
    assert (tree / ".course" / "ledger.json.broken-2").exists()


def test_looking_does_not_write(tree):  # noqa: F811
    """The ledger is written when something changed."""
    ex.states()
    assert not (tree / ".course" / "ledger.json").exists()


def test_an_error_inside_leaves_the_ledger_as_it_was(tree):  # noqa: F811
    """Half a change is none."""
    with pytest.raises(KeyError), ledger() as book:
        book["x"] = {"mine": "y"}
        raise KeyError
    assert not (tree / ".course" / "ledger.json").exists()


def test_a_package_that_cannot_be_written_gets_a_clear_message(monkeypatch):
    """What happened and what to do, and nothing left behind."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    before = module_text()
    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(files.CourseError, match=r"Permission denied.*\n.*checkout of your own"):
        ex.lay({BLOCKS_FOR: MINE}, mine=True)
    monkeypatch.undo()
    assert before.startswith('"""Blocks')


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_tree_gets_a_clear_message(tree):  # noqa: F811
    """The same with the real thing."""
    tree.chmod(0o500)
    try:
        with pytest.raises(files.CourseError, match="checkout of your own"):
            ex.lay({BLOCKS_FOR: MINE}, mine=True)
    finally:
        tree.chmod(0o700)


def test_two_processes_that_build_at_once_lose_nothing(tree):  # noqa: F811
    """Each lays another function of the same file ten times."""
    script = (
        "import sys; from pathlib import Path; from course import files, exercises as ex\n"
        "files.HOME = Path(sys.argv[1]); name = sys.argv[2]; source = ex.current(name)\n"
        "for i in range(10): ex.lay({name: source + f'\\n    # {i}'}, mine=True)\n"
    )
    paths = [str(tree), str(files.HOME.parent), str(ex.__file__).rsplit("/course/", 1)[0]]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", script, str(tree)]
    running = [
        subprocess.Popen([*command, name], env=env, cwd=tree) for name in (BLOCKS_FOR, ALLOCATE)
    ]
    assert [process.wait(60) for process in running] == [0, 0]
    book = json.loads((tree / ".course" / "ledger.json").read_text())
    assert {name: len(entry["history"]) for name, entry in book.items()} == {
        BLOCKS_FOR: 10,
        ALLOCATE: 10,
    }
    assert module_text().count("# 9") == 2


def test_the_time_of_change_never_runs_far_ahead(tree):  # noqa: F811
    """One second for each write, or make and others would wonder."""
    path = files.module_path(BLOCKS_FOR)
    for number in range(3):
        files.write(path, f"# {number}")
    assert path.stat().st_mtime < time.time() + 4
