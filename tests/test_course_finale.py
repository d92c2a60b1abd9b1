"""The end of chapter 11: every exercise of the course runs, and a cold start is shown by phase."""

import pytest
from tiny_checkpoint import make_checkpoint

from course.exercises import exercises
from course.props.finale import Finale, finale
from course.props.race import cold_start

pytestmark = pytest.mark.course


def test_every_exercise_runs_and_all_ways_give_the_same_tokens():
    """On a CPU: the engine, overlapped, on the tape, on two ranks, on interpreted kernels."""
    ending = finale()
    assert ending.errors == {}
    assert set(ending.ran) == set(exercises())
    assert set(ending.same_tokens) == {"generate", "overlap", "tape", "ranks", "kernels"}
    assert all(ending.same_tokens.values())


def test_a_stage_that_breaks_off_is_named():
    """With its error; what ran is counted all the same."""
    ending = Finale({"a.b": "generate"}, {"generate": True, "tape": False}, {"ranks": "it is open"})
    text = ending.in_words({"a.b": "passed"})
    assert "1 of them are yours" in text
    assert "Same tokens as `generate`: generate." in text
    assert "ranks broke off: it is open" in text


def test_a_cold_start_has_phases_up_to_the_first_token(tmp_path):
    """In the order in which they happen."""
    phases = cold_start(str(make_checkpoint(tmp_path / "model")))
    assert next(iter(phases)) == "Python starts"
    assert list(phases)[-1] == "first token"
    assert all(seconds >= 0 for seconds in phases.values())
