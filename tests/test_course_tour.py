"""What chapter 00 quotes is what a learner reads: IPython's own messages, and a failed check."""

import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from course import exercises as ex
from course import sandbox, splice
from course.check import run_tests
from course.files import HOME
from course.verdict import verdict

pytestmark = pytest.mark.course

LESSON = (HOME / "course" / "lessons" / "00_tour.md").read_text("utf-8")
BUILD = "%%build naive.generate_tokens\ndef generate_tokens(model, prompt_token_ids):\n    ...\n"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A kernel that has just been started: nothing of the course is loaded."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    InteractiveShell.clear_instance()
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("cell", [BUILD, "# mine\n" + BUILD], ids=["restarted", "comment above"])
def test_the_messages_of_ipython_are_quoted(cell, shell, capsys):
    """We do not word them, so a new IPython may change them: then the lesson follows."""
    shell.run_cell(cell)
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("UsageError: ")
    assert f"```text\n{printed}\n```" in LESSON


def test_the_wrong_answer_of_the_lesson_is_told_what_the_lesson_says():
    """Step 2 of the exercise, word for word."""
    line = re.search(r"`(return list\(prompt_token_ids\))`", LESSON)[1]
    name = "naive.generate_tokens"
    source = splice.blank(ex.find_exercise(name).reference, line)
    with sandbox.temporary(reference=True) as folder:
        sandbox.set_sources(folder, {name: source})
        ok, text = verdict(name, run_tests(name, folder), folder)
    assert not ok
    assert f"```text\n{text}\n```" in LESSON, text


def test_every_rule_has_a_wrong_answer():
    """The comments of the library name the rules of the lesson."""
    rules = re.findall(r"^(\d)\. \*\*", LESSON, re.MULTILINE)
    library = (HOME / "course" / "mistakes" / "00_tour.py").read_text("utf-8")
    assert rules == ["1", "2", "3", "4", "5"]
    assert set(re.findall(r"^# rule (\d)", library, re.MULTILINE)) == set(rules)


def test_the_lesson_counts_its_exercises():
    """One, as it says."""
    assert [e.name for e in ex.exercises().values() if e.notebook == "00_tour"] == [
        "naive.generate_tokens"
    ]
