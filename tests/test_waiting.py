"""minivllm.waiting: what a user sees while something takes long."""

import io
import sys
import time

import pytest

from minivllm import waiting as module
from minivllm.waiting import waiting


class Screen(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of a log, a hundred times as fast."""
    monkeypatch.setattr(module, "PATIENCE", 0.02)
    monkeypatch.setattr(module, "EVERY", 0.05)


def wait_for(what: str, written: io.StringIO, seconds: float = 10.0) -> str:
    """What stands in `written`, once `what` is there."""
    end = time.monotonic() + seconds
    while what not in written.getvalue() and time.monotonic() < end:
        time.sleep(0.005)
    return written.getvalue()


def test_what_is_short_leaves_no_line_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a notebook sees nothing of what takes no time."""
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with waiting("importing PyTorch"):
        pass
    assert log.getvalue() == ""


def test_a_log_gets_line_after_line_with_what_it_is_and_how_far(
    monkeypatch: pytest.MonkeyPatch, hurry: None
) -> None:
    """The first after a while, more as it goes on, each with what the body has told last."""
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with waiting("compiling") as come_to:
        wait_for("compiling: 0 s\n", log)
        come_to("3 of 14")
        wait_for("3 of 14", log)
    lines = log.getvalue().splitlines()
    assert lines[0] == "compiling: 0 s"
    assert lines[-1] == "compiling: 3 of 14, 0 s"


def test_a_terminal_shows_it_at_once_and_nothing_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line stands there before the body begins, and blanks are over it at the end."""
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with waiting("importing PyTorch"):
        assert screen.getvalue() == "\rimporting PyTorch: 0 s"
    assert screen.getvalue().endswith(f"\r{' ' * len('importing PyTorch: 0 s')}\r")


def test_an_error_ends_the_waiting_and_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, hurry: None
) -> None:
    """No line comes after the body has failed."""
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with pytest.raises(ValueError, match="no such model"), waiting("loading"):
        raise ValueError("no such model")
    said = log.getvalue()
    time.sleep(0.1)
    assert log.getvalue() == said
