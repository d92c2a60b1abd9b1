"""Copies of the package on which notebooks and checks run, so that the tree never changes.

A sandbox is a folder with `minivllm/` and the settings of pytest. A process whose environment is
`environment(folder)` imports the package from there, whatever its working directory is, and the
course from the real tree. Its checks run the tests of the real tree: pytest compiles those once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from course import exercises as ex
from course import files, splice

STRICT = "MINIVLLM_COURSE_STRICT"  # with it a failed check raises, without it it is shown
THREADS = "NUMBA_NUM_THREADS"
CELL_LIMIT = 300  # seconds
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of tracebacks, for terminals


def make(folder: Path, reference: bool = False) -> Path:
    """Copy the package as it is, ledger included, into `folder`; returns `folder`.

    `reference`: without the ledger, and with our version of every exercise in place of the
    learner's.
    """
    # What Python and numba compiled goes along: it knows its source by time and size, which the
    # copy keeps.
    skip = shutil.ignore_patterns("*.tmp", "lock", ".hypothesis")
    shutil.copytree(files.root() / "minivllm", folder / "minivllm", ignore=skip)
    shutil.copy(files.root() / "pyproject.toml", folder)
    if reference:
        set_sources(folder, {e.name: e.reference for e in ex.exercises().values()})
    elif (files.root() / ".course").exists():
        shutil.copytree(files.root() / ".course", folder / ".course", ignore=skip)
    return folder


@contextmanager
def temporary(reference: bool = False) -> Iterator[Path]:
    """A sandbox that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="minivllm-course-", ignore_cleanup_errors=True) as name:
        yield make(Path(name).resolve(), reference)


def set_sources(folder: Path, sources: Mapping[str, str]) -> None:
    """Put other definitions in the place of exercises of the sandbox: {name: source}."""
    for path, text in ex.spliced(folder, sources).items():
        if text != files.read(path):
            files.write(path, text)


def take_out(folder: Path, wanted: Callable[[ex.Exercise], bool]) -> None:
    """Replace the body of every wanted exercise by a hole that raises."""
    chosen = [exercise for exercise in ex.exercises().values() if wanted(exercise)]
    set_sources(folder, {e.name: splice.blank(e.reference, ex.raising_hole(e)) for e in chosen})


def environment(folder: Path, strict: bool = True) -> dict[str, str]:
    """The variables of a process that shall import minivllm from `folder`."""
    paths = [str(folder), str(files.HOME), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # Else `python -m x`, started in the tree, would find the tree first (Python 3.11+).
        "PYTHONSAFEPATH": "1",
        # A kernel called python3 in the user's home may belong to another environment.
        "JUPYTER_PREFER_ENV_PATH": "1",
    }
    variables.pop(STRICT, None)
    return variables | ({STRICT: "1"} if strict else {})


@contextmanager
def entered(folder: Path) -> Iterator[None]:
    """The same for processes that are started by code which takes no environment."""
    before = dict(os.environ)
    os.environ.update(environment(folder))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """For as many processes as cores: numba's threads would wait for each other, in loops that
    burn what the others need (5 times the work for a chapter that runs the model)."""
    before = os.environ.get(THREADS)
    os.environ.setdefault(THREADS, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]


def run_notebook(
    nb: Any,
    folder: Path,
    cwd: Path,
    *,
    strict: bool = True,
    allow_errors: bool = False,
    timeout: int = CELL_LIMIT,
) -> None:
    """Run the cells of `nb` on the sandbox `folder`; their outputs land in `nb`.

    Raises CourseError with the cell's own words at the first error, or, with `allow_errors`,
    goes on as Jupyter's "Run All" does after a cell tagged so.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    client = NotebookClient(
        nb,
        timeout=timeout,
        kernel_name="python3",
        allow_errors=allow_errors,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(cwd)}},
    )
    try:
        # Its own stderr holds warnings about the connection; that of the cells is an output.
        client.execute(env=environment(folder, strict), stderr=subprocess.DEVNULL)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise files.CourseError(COLOUR.sub("", str(error)).strip()) from None
