"""The leader's workers: processes on this host, or those that `torchrun` has started on several.

On one host the leader starts the workers, watches them and ends them; they end when the leader
ends, whatever the cause. Does not handle what a worker does (`assembly.worker`) or the
messages it gets (`leader`). Not built in the course.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from minivllm.distributed.process_group import GroupError, ProcessGroup

READY = b"ready\n"  # a worker prints it once it can meet the others
GRACE = 5.0  # seconds that workers have to end by themselves
REPORT_WAIT = 3.0  # seconds between a lost connection and the end of its process, at most
POLL = 0.02  # seconds between two looks at a process


def started_by_torchrun() -> bool:
    """Whether this process is one of several that `torchrun` has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def torchrun_group(size: int) -> ProcessGroup:
    """Join the group of all processes that `torchrun` has started, on one host or several.

    Raises ValueError unless there are `size` of them.
    """
    started = int(os.environ["WORLD_SIZE"])
    if started != size:
        raise ValueError(
            f"tensor_parallel_size={size}, but torchrun has started {started} processes; make the"
            " two equal"
        )
    store, rank, size = next(rendezvous("env://"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == size
    return ProcessGroup(store, rank, size, local)


# -- processes of this host -------------------------------------------------------------------


class Worker:
    """A process that is one rank of this host's group: `python -m MODULE STORE RANK SIZE`."""

    def __init__(self, module: str, store: Path, rank: int, size: int, threads: int) -> None:
        self.rank = rank
        # Not multiprocessing: its spawn imports the caller's main module again, which a script
        # without a guard does not survive, and it sends pickles.
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(store), str(rank), str(size)],
            env=_environment(rank, threads),
            stdin=subprocess.PIPE,  # the worker ends when this end is closed, by whatever cause
            stdout=subprocess.PIPE,  # `READY`, and later its last words
            start_new_session=True,  # Ctrl-C in a terminal reaches the leader only
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def await_ready(self) -> None:
        """Wait until the process can meet the others. Raises GroupError if it ends before."""
        assert self.process.stdout is not None, "it was started with a pipe"
        said = b""
        while not said.endswith(READY):
            line = self.process.stdout.readline()
            if not line:
                self.process.wait()
                raise GroupError(f"worker {self.rank} did not start: {self.last_words(said)}")
            said += line

    def last_words(self, said: bytes = b"") -> str:
        """Why the process has ended; `said` is what has been read of its output."""
        assert self.process.stdout is not None, "it was started with a pipe"
        report = (said + self.process.stdout.read()).decode(errors="replace").strip()
        code = self.process.returncode
        return report or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")

    def end(self, grace: float) -> None:
        """Tell the process to end, and kill it after `grace` seconds. May be called twice."""
        assert self.process.stdin is not None and self.process.stdout is not None, "pipes"
        self.process.stdin.close()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def _environment(rank: int, threads: int) -> dict[str, str]:
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),  # more threads would spin while they wait for a core
    }


class Team(ProcessGroup):
    """The leader's group; the other ranks are processes that it has started, which run `module`.

    Raises GroupError, with the last words of the worker, if one does not start.
    """

    def __init__(self, size: int, module: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="minivllm-")
        self.num_threads = torch.get_num_threads()
        threads = max(1, self.num_threads // size)  # the ranks share the cores
        # The ranks meet at a file: a port could belong to another program.
        path = Path(self.folder) / "store"
        self.workers: list[Worker] = []
        # Without `close` as well: at the interpreter's end, or when the team is collected.
        weakref.finalize(self, _end_all, self.workers, self.folder)
        try:
            for rank in range(1, size):
                self.workers.append(Worker(module, path, rank, size, threads))
            for worker in self.workers:
                worker.await_ready()
            super().__init__(dist.FileStore(str(path), size), 0, size, local=True)
        except BaseException:
            _end_all(self.workers, self.folder)
            raise
        torch.set_num_threads(threads)

    def cause_of(self, error: Exception) -> GroupError:
        """Return the error of the worker that has ended, or else which ones do not answer."""
        deadline = time.monotonic() + REPORT_WAIT
        while not any(worker.has_ended for worker in self.workers) and time.monotonic() < deadline:
            time.sleep(POLL)
        reports = {worker.rank: worker.last_words() for worker in self.workers if worker.has_ended}
        silent = [str(worker.rank) for worker in self.workers if not worker.has_ended]
        _end_all(self.workers, self.folder, grace=0)
        # A worker that only lost the others, or gave up waiting, is not the cause.
        causes = [rank for rank in reports if GroupError.__name__ not in reports[rank]]
        if silent and not causes:
            return GroupError(
                f"worker {' and '.join(silent)} of {self.size} did not answer within"
                f" {self.timeout.total_seconds():g} s, and was ended; make a new LLM. If a step can"
                f" take so long, raise distributed_timeout_seconds ({error})"
            )
        rank = min(causes or reports)
        return GroupError(f"worker {rank} of {self.size} ended: {reports[rank]}; make a new LLM")

    def check(self) -> None:
        """Raise if a worker has ended."""
        super().check()
        if any(worker.has_ended for worker in self.workers):
            self.failure = self.cause_of(GroupError("a worker has ended"))
            raise self.failure

    def close(self) -> None:
        """Let the workers end, kill those that do not, and take their cores back."""
        super().close()
        _end_all(self.workers, self.folder)
        torch.set_num_threads(self.num_threads)


def _end_all(workers: list[Worker], folder: str, grace: float = GRACE) -> None:
    for worker in workers:
        worker.end(grace)
    shutil.rmtree(folder, ignore_errors=True)
