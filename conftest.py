"""What `pytest --nbval`, the command of the course, does beyond nbval.

Every notebook runs on a copy of the package, so that checking never changes the tree: solutions
with our version of every exercise, other notebooks with the package as it is. Outputs are
compared only in cells tagged `nbval-check-output`, and the report ends with the exercises by
name and the map. Tests do without this file: they also run with `--noconftest`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

CELL_LIMIT = 300  # seconds
MAX_WORKERS = 4  # processes of a run of everything: each may hold the model
GATES = "tests/test_course_chapters.py"
NBVAL_CELL_LIMIT = 2000  # the default of nbval, too long to wait for
WORDS = ["passed", "open", "not right yet", "not run"]  # the later one tells more
KERNEL_DIED = "The kernel died in this cell: a crash, os._exit, or out of memory."


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A run of everything uses the cores of the machine; workers share them, a thread each."""
    option, cores = config.option, os.cpu_count() or 1
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # a worker is asked, too, and must start no workers of its own
    is_everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    asks_for_one = option.collectonly or option.usepdb or option.capture == "no"
    chosen = is_everything and not asks_for_one and getattr(option, "numprocesses", 0) is None
    if chosen:
        option.numprocesses, option.dist = min(cores, MAX_WORKERS), "loadfile"
        option.loadscopereorder = False  # the longest come first, not the largest number
    if num_workers := getattr(option, "numprocesses", None):
        # Threads that wait for each other's cores cost more than they bring: with torch's alone
        # set, numba's would still burn several times the work of a chapter that runs the model.
        share = cores // num_workers if isinstance(num_workers, int) else 1  # else it is "auto"
        for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ.setdefault(name, str(max(1, share)))
    if chosen:
        # The kernels are compiled here once, instead of by each worker, check and notebook.
        code = "from minivllm.cpu import ops as cpu_ops; cpu_ops.warm_up()"
        subprocess.run([sys.executable, "-c", code], cwd=config.rootpath)


def pytest_configure(config: pytest.Config) -> None:
    """Set what a learner would otherwise have to type."""
    option = config.option
    if getattr(option, "nbval", False):
        from nbval.kernel import RunningKernel

        option.nbval_lax = True
        # A notebook that cannot be read, one with conflict markers say, fails alone.
        option.continue_on_collection_errors = True
        option.nbval_current_env = option.nbval_kernel_name is None
        if option.nbval_cell_timeout == NBVAL_CELL_LIMIT:
            option.nbval_cell_timeout = CELL_LIMIT
        RunningKernel.await_reply = await_reply
        for text in ("Non-unique cell id", "Cell is missing an id field"):
            # A learner copied cells: nbformat repairs that, and their code is not at fault.
            config.addinivalue_line("filterwarnings", f"ignore:{text}")
    if getattr(option, "dist", "no") in ("load", "worksteal"):
        option.dist = "loadfile"  # the cells of a notebook share one kernel


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests by file, and those of GATES one by one: each has a chapter of its own."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(GATES) else nodeid.split("::")[0]

    return ByFile(config, log)


def await_reply(kernel: Any, msg_id: str, timeout: float | None = None) -> None:
    """As nbval's, but a kernel that died is noticed within a second, and not at the limit."""
    end = time.monotonic() + (timeout or CELL_LIMIT)
    while time.monotonic() < end:
        try:
            message = kernel.get_message("shell", timeout=1)
        except Empty:
            if not kernel.is_alive():
                raise RuntimeError(KERNEL_DIED) from None
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            return
    raise Empty


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """A notebook's kernel, started at its first cell, gets a copy of the package of its own."""
    notebook: Any = item.parent
    runs = hasattr(item, "cell") and item.get_closest_marker("skip") is None
    if not runs or notebook.kernel is not None:
        return (yield)
    from course import sandbox

    folder = tempfile.TemporaryDirectory(prefix="minivllm-nbval-", ignore_cleanup_errors=True)
    reference = notebook.path.parent.name == "solutions"
    try:
        with sandbox.entered(sandbox.make(Path(folder.name).resolve(), reference)):
            result = yield
    except BaseException:
        folder.cleanup()
        raise
    notebook.addfinalizer(folder.cleanup)  # known to pytest's stack only now
    return result


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note which exercises an item is about, in a way that xdist carries to the report."""
    cell = getattr(item, "cell", None)
    if cell is None:
        names = [name for mark in item.iter_markers("exercise") for name in mark.args]
    else:
        names = cell.metadata.get("course", {}).get("check", [])
    item.user_properties += [("exercise", name) for name in names]
    if cell is not None and (missing := lacking_of(item.path)):
        item.add_marker(pytest.mark.skip(reason=f"this chapter {missing}"))
    if cell is not None and names:
        item.repr_failure = check_text  # type: ignore[method-assign]


@functools.lru_cache
def lacking_of(notebook: Path) -> str | None:
    """What a notebook needs and this machine lacks, or None."""
    from course.needs import lacking

    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return lacking("\n".join("".join(cell["source"]) for cell in cells))


def check_text(excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
    """Of a failed check cell the course's own words, without "Cell 7: ..." and traceback."""
    text = getattr(excinfo.value, "inner_traceback", None) or str(excinfo.value)
    return str(text).strip()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With workers the long ones first, so that no worker is left alone with one of them."""
    if getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput"):
        items.sort(key=rank)


def rank(item: pytest.Item) -> int:
    """Notebooks and gates 0, what starts other processes or takes its time 1, all the rest 2."""
    if hasattr(item, "cell") or item.nodeid.startswith(GATES):
        return 0
    slower = any(item.get_closest_marker(name) for name in ("course", "long", "model"))
    return 1 if slower else 2


# -- the end of the report ---------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The exercises of each file by name, then the map."""
    files = exercise_words(terminalreporter.stats)
    if not files:
        return
    terminalreporter.section("exercises")
    for file, words in sorted(files.items()):
        for line in file_lines(file, words):
            terminalreporter.write_line(line)
    terminalreporter.write_line("")
    if any(file.endswith(".ipynb") for file in files):
        terminalreporter.write_line(
            "The notebooks ran on copies of the package. The package itself:"
        )
    terminalreporter.write_line(map_or_reason())


def exercise_words(stats: dict[str, list[Any]]) -> dict[str, dict[str, str]]:
    """file -> exercise -> how it stands, the worst of its tests counting."""
    files: dict[str, dict[str, str]] = {}
    for outcome, reports in stats.items():
        # Deselected tests have no report.
        for report in reports if outcome != "deselected" else ():
            names = [v for k, v in getattr(report, "user_properties", ()) if k == "exercise"]
            if not names or (outcome == "" and report.when != "call"):
                continue  # set-up and take-down, without fault
            words = files.setdefault(report.nodeid.split("::")[0], {})
            for name in names:
                words[name] = max(words.get(name, "passed"), word(outcome, report), key=WORDS.index)
    return files


def word(outcome: str, report: Any) -> str:
    """One of WORDS for one report."""
    text = str(report.longrepr or "")
    if outcome == "passed":
        return "passed"
    if outcome not in ("failed", "error") or "Kernel dead" in text or KERNEL_DIED in text:
        return "not run"  # skipped, or after a cell that ended the kernel
    return "open" if "Open: " in text or "NotImplementedError" in text else "not right yet"


def file_lines(file: str, words: dict[str, str]) -> list[str]:
    """One line for each word; of a test file in which all is well, none."""
    if not file.endswith(".ipynb") and set(words.values()) == {"passed"}:
        return []
    grouped = [(w, [name for name in words if words[name] == w]) for w in WORDS]
    return [file] + [f"    {w:<14} {', '.join(names)}" for w, names in grouped if names]


def map_or_reason() -> str:
    """The map of the course, or why it cannot be drawn."""
    from course.exercises import CourseError, states
    from course.progress import progress_map

    try:
        return progress_map(states())
    except CourseError as error:
        return str(error)
