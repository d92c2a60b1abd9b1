"""What runs inside the process of a check: limits, then pytest with the plugin below.

Started by `check` as `python -m course.check_process FOLDER`. FOLDER/job.json says what to run;
reports go to FOLDER/report-N, the stack of a test that does not end to FOLDER/stacks-N.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import linecache
import marshal
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import cache_from_source, source_hash, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any, cast

import pytest

from course import explain

MAX_FILE = 64 << 20  # bytes: a loop that prints must not fill the disk
MAX_MEMORY = 4 << 30  # bytes of own memory: a list that grows must not make the machine swap
MAX_PRINTED = 300  # characters shown of what the learner's code printed
# Worth importing once, before forks.
HEAVY = ("numpy", "torch", "triton", "transformers", "hypothesis")


def main(folder: Path) -> None:
    """Run the job; never returns."""
    job = json.loads((folder / "job.json").read_text("utf-8"))
    _limit()
    for module in job["warm"]:
        _make_ready(module)
    options = ["-q", "--noconftest", "-c", os.devnull, "--rootdir", job["root"], "--tb=no"]
    # The last two collect all garbage at the end, for warnings that nobody would see.
    unused = ("cacheprovider", "faulthandler", "warnings", "doctest")
    for name in (*unused, "unraisableexception", "threadexception"):
        options += ["-p", f"no:{name}"]
    code = pytest.main([*options, job["tests"]], plugins=[Variants(job, folder)])
    os._exit(int(code))


def _make_ready(module: str) -> None:
    """Import a module before the forks."""
    if module == "triton" and not sys.modules["torch"].cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read by the import: tests would be too late
    importlib.import_module(module)


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


class Variants:
    """The pytest plugin that starts the `Reporter`: of the one variant, or of each in a fork.

    The forks leave each other alone: what they share is pytest as it stands before it collects.
    """

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.job, self.folder = job, folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """From here on this is the process of one variant."""
        index, plugins = 0, session.config.pluginmanager
        if len(self.job["variants"]) > 1:  # never without fork: the check itself has one
            index = _fork_each(len(self.job["variants"]))
            capture: Any = plugins.getplugin("capturemanager")
            capture.stop_global_capturing()  # it writes to files that all forks have open
            capture.start_global_capturing()
            capture.suspend_global_capture()
        sys.meta_path.insert(0, _FromText(Path(self.job["root"]), self.job["variants"][index]))
        plugins.register(Reporter(self.job, self.folder, index))


def _fork_each(count: int) -> int:
    """Returns in `count` children, with their numbers, as many at a time as there are cores; the
    parent waits for them and ends."""
    num_running = 0
    for index in range(count):
        if num_running >= (os.cpu_count() or 1):
            os.wait()
            num_running -= 1
        if os.fork() == 0:
            return index
        num_running += 1
    for _ in range(num_running):
        os.wait()
    os._exit(0)


class Reporter:
    """The pytest plugin: chooses the tests of the exercise, limits their time, reports."""

    def __init__(self, job: dict[str, Any], folder: Path, index: int) -> None:
        self.name, self.root, self.limit = job["name"], job["root"], job["limit"]
        self.tests = Path(job["tests"])
        self.report = folder / f"report-{index}"
        self.stacks = open(folder / f"stacks-{index}", "w")  # noqa: SIM115 - open to the end
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
        """Pass by the files beside the one with the tests: pytest would look at each of them."""
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
        heavy = [name for name in HEAVY if name in sys.modules]
        self.say("done", package=getattr(package, "__file__", None), heavy=heavy)

    def pytest_unconfigure(self) -> None:
        """End at once: threads that the learner's code left would keep the process."""
        if sys.stdout:
            sys.stdout.flush()
        os._exit(0)


class _FromText(MetaPathFinder):
    """Imports the modules of the package from text, given or read now.

    Never from the code that Python keeps for the file: that of a text just replaced may look valid.
    """

    def __init__(self, root: Path, texts: Mapping[str, str]) -> None:
        self.package, self.texts = root / "minivllm", texts

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        file = self.package / f"{module}.py"
        if package != "minivllm" or not file.is_file():
            return None
        if module in self.texts:
            _show_as(str(file), self.texts[module])
        loader = _TextLoader(str(file), self.texts.get(module))
        return spec_from_file_location(fullname, str(file), loader=loader)


class _TextLoader(SourceLoader):
    """Compiles a text. The code of a file is kept beside Python's own, under a hash of all that it
    was made from: the next check, and every fork, needs not compile it again."""

    def __init__(self, file: str, text: str | None) -> None:
        self.file, self.text = file, text

    def get_filename(self, fullname: str) -> str:
        return self.file

    def get_data(self, path: str) -> bytes:
        if path != self.file:
            raise OSError(path)
        return Path(path).read_bytes() if self.text is None else self.text.encode("utf-8")

    def get_code(self, fullname: str = "") -> CodeType:
        data = self.get_data(self.file)
        if self.text is not None:
            return self.source_to_code(data, self.file)
        kept = Path(cache_from_source(self.file)).with_suffix(".check")
        stamp = source_hash(self.file.encode() + data)
        with suppress(OSError, ValueError, EOFError, TypeError):  # none, or not whole
            if (raw := kept.read_bytes()).startswith(stamp):
                return cast(CodeType, marshal.loads(raw[len(stamp) :]))
        code = self.source_to_code(data, self.file)
        self._keep(kept, stamp + marshal.dumps(code))
        return code

    def _keep(self, path: Path, data: bytes) -> None:
        new = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a folder that is not ours to write in
            path.parent.mkdir(exist_ok=True)
            new.write_bytes(data)
            new.replace(path)


def _show_as(file: str, text: str) -> None:
    """Tracebacks and `inspect` (Triton compiles what that finds) see the text, not the file."""
    lines = [line + "\n" for line in text.split("\n")]
    linecache.cache[file] = (len(text), None, lines, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
