"""Run the tests of one exercise in a process of their own, with limits; what happens inside it
is in `check_process`.

The checks help the learner; they do not guard against somebody who wants to deceive them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from course import files, forks

TEST_LIMIT = 20  # seconds for one test; 10 were too few for a right answer on a busy machine
TOTAL_LIMIT = 300  # seconds for all of them, imports included
TRY_LIMIT = 2  # seconds for one test of a variant
TRIES_LIMIT = 20  # seconds for all variants: they explain, nobody waits for them longer

TOOLS = Path(__file__).resolve().parents[1]  # where `import course` finds this

Event = dict[str, Any]
Texts = Mapping[str, str]  # module -> text to use in place of its file


def run_tests(name: str, root: Path) -> list[Event]:
    """Run the tests marked with `name` on the package in `root`.

    Returns events in order: collected, then start and pass, skip or fail for each test, done
    (broken: the test file cannot be imported);
    the last one, end, has the exit code, the output, and the stack of a test that did not end.
    """
    with _process(name, root, [{}], TEST_LIMIT) as (process, folder):
        try:
            process.wait(TOTAL_LIMIT)
        except subprocess.TimeoutExpired:
            _kill(process)
        return _events(folder, 0, process.wait())


def run_variants(
    name: str, root: Path, variants: list[Texts], warm: list[str], limit: float = TRY_LIMIT
) -> list[list[Event]]:
    """The same for variants of the package, in forks of one process; [] for one not reached.

    `warm`: modules that the process imports once, before it forks. `limit`: seconds for one test.
    """
    if not variants:
        return []
    with _process(name, root, variants, limit, warm) as (process, folder):
        with suppress(subprocess.TimeoutExpired):
            process.wait(TRIES_LIMIT)
        return [_events(folder, index, 0) for index in range(len(variants))]


def tests_of(name: str, root: Path) -> Path:
    """The file with the tests of an exercise."""
    home = root if (root / "tests").is_dir() else files.HOME
    return home / "tests" / f"test_{name.split('.', 1)[0]}.py"


@contextmanager
def _process(
    name: str, root: Path, variants: list[Texts], limit: float, warm: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The process with the tests; it and all that it started are gone at the end."""
    job = {
        "name": name,
        "root": str(root),
        "tests": str(tests_of(name, root)),
        "variants": variants,
        "limit": limit,
        "warm": warm or [],
    }
    with tempfile.TemporaryDirectory(prefix="minivllm-check-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        with open(folder / "output", "wb") as output:  # not a pipe: grandchildren would hold it
            process = subprocess.Popen(
                forks.command("-m", "course.check_process", str(folder)),
                cwd=root,
                env=_environment(root, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, folder
        finally:  # also when the learner interrupts
            _kill(process)


def _environment(root: Path, folder: Path) -> dict[str, str]:
    """Nothing of the process we are in may choose other tests or another package."""
    paths = [str(root), str(TOOLS), os.environ.get("PYTHONPATH", "")]
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        # What the tests import may draw: never into a window or a notebook.
        "MPLBACKEND": "agg",
    }
    drop = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTHONWARNINGS")
    return {k: v for k, v in os.environ.items() if k not in drop} | ours


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and, where there are process groups, all that it started."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _events(folder: Path, index: int, code: int) -> list[Event]:
    """What one run reported, and how it ended."""
    report = folder / f"report-{index}"
    if index and not report.exists():
        return []
    lines = report.read_text("utf-8").split("\n") if report.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    stacks, output = folder / f"stacks-{index}", folder / "output"
    end = {
        "event": "end",
        "code": code,
        "out": output.read_bytes()[-4000:].decode("utf-8", "replace"),
        "stacks": stacks.read_text("utf-8", "replace") if stacks.exists() else "",
    }
    return [*events, end]
