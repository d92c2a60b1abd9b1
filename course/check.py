"""Run the tests of one exercise in a process of their own, with limits; what happens inside it
is in `check_process`.

The checks help learners; they do not guard against deception.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from course import files

TEST_LIMIT = 20  # seconds for one test; 10 were too few for a right answer on a busy machine
TOTAL_LIMIT = 300  # seconds for all of them, imports included

TOOLS = Path(__file__).resolve().parents[1]  # where `import course` finds this

# Its paths come as arguments: PYTHONPATH could not hold one with a ":" in it.
START = (
    "import sys; folder, *sys.path[:0] = sys.argv[1:];"
    " from course import check_process; check_process.main(folder)"
)

Event = dict[str, Any]


def run_tests(name: str, root: Path, limit: float | None = None) -> list[Event]:
    """Run the tests marked with `name` on the package in `root`; a test may take `limit` seconds.

    Returns events in order: collected, then start and pass, skip or fail for each test, done
    (broken: the test file cannot be imported). The last one, end, has the exit code, the output,
    and the stack of a test that did not end.
    """
    job = {
        "name": name,
        "root": str(root),
        "tests": str(tests_of(name, root)),
        "limit": limit or TEST_LIMIT,
    }
    with tempfile.TemporaryDirectory(prefix="minivllm-check-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        with open(folder / "output", "wb") as output:  # not a pipe: grandchildren would hold it
            process = subprocess.Popen(
                [sys.executable, "-c", START, str(folder), str(root), str(TOOLS)],
                cwd=root,
                env=_environment(root, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TOTAL_LIMIT)
        finally:  # also when the learner interrupts
            _kill(process)
        return _events(folder, process.returncode)


def tests_of(name: str, root: Path) -> Path:
    """The file with the tests of an exercise."""
    home = root if (root / "tests").is_dir() else files.HOME
    return home / "tests" / f"test_{name.split('.', 1)[0]}.py"


def _environment(root: Path, folder: Path) -> dict[str, str]:
    """Ours, without what would choose other tests or another package."""
    paths = [str(root), str(TOOLS), os.environ.get("PYTHONPATH", "")]
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        "MPLBACKEND": "agg",  # what the tests draw goes into no window and no notebook
    }
    drop = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTHONWARNINGS")
    return {k: v for k, v in os.environ.items() if k not in drop} | ours


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and, where there are process groups, all that it started."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _events(folder: Path, code: int) -> list[Event]:
    """What a run reported, and how it ended."""
    report, stacks = folder / "report", folder / "stacks"
    lines = report.read_text("utf-8").split("\n") if report.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    end = {
        "event": "end",
        "code": code,
        "out": (folder / "output").read_bytes()[-4000:].decode("utf-8", "replace"),
        "stacks": stacks.read_text("utf-8", "replace") if stacks.exists() else "",
    }
    return [*events, end]
