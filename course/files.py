"""Where the course and the package lie, how their files are read and written, and our errors."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from pathlib import Path

# The tree that holds course/, lessons and solutions. `root()` may be another one, a copy.
HOME = Path(__file__).resolve().parents[1]


class CourseError(Exception):
    """Shown to the learner as its text alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]  # IPython asks for this instead of printing a traceback


class OpenExercise(CourseError):
    """The body is a hole, or borrowed: there is nothing of the learner's to check."""


class BuildError(CourseError):
    """The cell was not written into the package."""


class CheckFailed(CourseError):
    """The learner's code ran and is not right yet."""


def root() -> Path:
    """The directory that holds the package which `import minivllm` finds."""
    # Without importing it, so that a package that cannot be imported is found too.
    spec = importlib.util.find_spec("minivllm")
    if spec is None or spec.origin is None:
        raise CourseError("`import minivllm` finds nothing. In the checkout: pip install -e .")
    return Path(spec.origin).resolve().parents[1]


def module_path(name: str) -> Path:
    """The file of the module that an exercise belongs to."""
    return root() / "minivllm" / f"{name.split('.')[0]}.py"


def read(path: Path) -> str:
    """The text of a file, ends of lines as they are (`read_text` would change \\r\\n)."""
    return path.read_bytes().decode("utf-8")


def write(path: Path, text: str) -> None:
    """Replace or make a file in one step; its time of change is in another second than before.

    Compiled code is kept by whole seconds and size: without that, Python may go on with the
    old one.
    """
    temporary = ""
    try:
        old = path.stat() if path.exists() else None
        stamp = max(time.time(), int(old.st_mtime) + 1) if old else time.time()
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
        os.chmod(temporary, old.st_mode if old else 0o644)
        os.utime(temporary, (stamp, stamp))
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise not_writable(error, path) from None


def not_writable(error: OSError, path: Path) -> CourseError:
    """What to say where a file cannot be written."""
    return CourseError(
        f"Not written: {path} cannot be changed ({error.strerror or error}).\n"
        "The exercises are written into the package itself, so work in a checkout of your own: "
        "clone the repository there and run `pip install -e '.[course]'` in it."
    )
