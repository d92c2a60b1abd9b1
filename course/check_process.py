"""What runs inside the process of a check: limits, then pytest with the plugin below.

`check` starts it with a folder. job.json there says what to run; the report goes to the file
`report`, the stack of a test that does not end to `stacks`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from course import explain

MAX_FILE = 64 << 20  # bytes: a loop that prints must not fill the disk
MAX_MEMORY = 4 << 30  # bytes of own memory: a list that grows must not make the machine swap
MAX_PRINTED = 300  # characters shown of what the learner's code printed


def main(name: str) -> None:
    """Run the job in the folder of this name; never returns."""
    folder = Path(name)
    job = json.loads((folder / "job.json").read_text("utf-8"))
    _limit()
    options = ["-q", "--noconftest", "-c", os.devnull, "--rootdir", job["root"], "--tb=no"]
    # The last two collect all garbage at the end, for warnings that are not shown.
    unused = ("cacheprovider", "faulthandler", "warnings", "doctest")
    for name in (*unused, "unraisableexception", "threadexception"):
        options += ["-p", f"no:{name}"]
    # By its name alone: in a path, pytest would take "::" and "[" for the name of a test.
    tests = Path(job["tests"])
    os.chdir(tests.parent)
    code = pytest.main([*options, tests.name], plugins=[Reporter(job, folder)])
    os._exit(int(code))


def _limit() -> None:
    try:
        import resource
    except ImportError:
        return  # Windows
    limits = [("RLIMIT_FSIZE", MAX_FILE), ("RLIMIT_DATA", MAX_MEMORY), ("RLIMIT_CORE", 0)]
    for name, value in limits:
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, hard))


class Reporter:
    """The pytest plugin: chooses the tests of the exercise, limits their time, reports."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.name, self.root, self.limit = job["name"], job["root"], job["limit"]
        self.tests = Path(job["tests"])
        self.report = folder / "report"
        self.stacks = open(folder / "stacks", "w")  # noqa: SIM115 - open to the end
        self.compared: explain.Compared | None = None

    def say(self, event: str, **more: Any) -> None:
        """Write one event; each time anew, for the process may end at any moment."""
        with open(self.report, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **more}) + "\n")

    def pytest_configure(self, config: pytest.Config) -> None:
        """The marks that tests of the course carry."""
        for mark in ("exercise(*names)", "model", "slow", "gpu", "browser", "long"):
            config.addinivalue_line("markers", mark)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Ignore the other test files: pytest would look at each of them."""
        return None if self.tests.is_relative_to(collection_path) else True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """The test file, or the package it imports, cannot be imported."""
        if report.failed:
            self.say("broken", text=report.longreprtext)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of the exercise."""
        marks = [[n for m in item.iter_markers("exercise") for n in m.args] for item in items]
        items[:] = [item for item, names in zip(items, marks) if self.name in names]
        self.say("collected", tests=[item.name for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The clock of a test starts; at its end Python writes all stacks and exits."""
        self.compared = None
        self.say("start", test=nodeid.split("::")[-1])
        faulthandler.dump_traceback_later(self.limit, exit=True, file=self.stacks)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        """Remember the two sides of the comparison that failed."""
        self.compared = explain.compared(op, left, right)

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Report how a phase of a test ended."""
        if call.when == "teardown":
            faulthandler.cancel_dump_traceback_later()
        if call.excinfo is None:
            if call.when == "call":
                self.say("pass", test=item.name, seconds=call.duration)
            return
        error = explain.cause(call.excinfo.value)
        if isinstance(error, pytest.skip.Exception) and not explain.in_package(error, self.root):
            self.say("skip", test=item.name, reason=str(error))
            return
        printed = "".join(text for _, _, text in item._report_sections)[-MAX_PRINTED:]
        shown = explain.explain(error, item.path, self.root, self.name, self.compared)
        self.say("fail", test=item.name, seconds=call.duration, printed=printed, **shown)

    def pytest_sessionfinish(self) -> None:
        """Which package was tested; the last word of a run that came to its end."""
        package = sys.modules.get("minivllm." + self.name.split(".", 1)[0])
        self.say("done", package=getattr(package, "__file__", None), torch="torch" in sys.modules)

    def pytest_unconfigure(self) -> None:
        """End at once: threads that the learner's code left would keep the process."""
        if sys.stdout:
            sys.stdout.flush()
        os._exit(0)
