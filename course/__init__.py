"""The tooling of the course: `%load_ext course` in a notebook, `python -m course` in a terminal."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Give the notebook `%%build`, `%check`, `%restore`, `%undo`, `%progress`."""
    # Imported here: the processes that run checks import `course` too, and need no IPython.
    from course.magics import Course
    from course.needs import SkipCells

    course = Course(shell)
    shell.register_magics(course)
    shell.events.register("pre_run_cell", course.import_changes)
    shell.input_transformers_cleanup.append(drop_comments_above)
    if find_spec("triton") is None:
        shell.input_transformers_cleanup.append(SkipCells())
    shell.course = course


def unload_ipython_extension(shell: Any) -> None:
    """Take the hook out again, or `%reload_ext` would leave two."""
    shell.events.unregister("pre_run_cell", shell.course.import_changes)
    shell.input_transformers_cleanup[:] = [
        transform
        for transform in shell.input_transformers_cleanup
        if not getattr(transform, "__module__", "").startswith("course")
    ]


def drop_comments_above(lines: list[str]) -> list[str]:
    """The lines of a cell without comments above its %%build, which IPython wants first.

    Editors put `#%%` there, and learners notes.
    """
    for index, line in enumerate(lines):
        if line.startswith("%%build"):
            return lines[index:]
        if line.strip() and not line.startswith("#"):
            break
    return lines
