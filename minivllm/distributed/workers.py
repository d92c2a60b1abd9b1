"""The leader's workers: processes on this host, or those that `torchrun` has started on several.

On one host the leader starts them, looks after them and ends them; whatever ends the leader ends
them too. Leaves out what a worker does (`worker`) and what it is told (`leader`). Given (no
notebook builds it).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minivllm.assembly.devices import choose_device
from minivllm.checkpoint.weights import read_config
from minivllm.config import EngineConfig, replace, set_value
from minivllm.distributed.process_group import START_TIMEOUT, GroupError, ProcessGroup
from minivllm.tensor_parallel import require_fit

GRACE = 5.0  # seconds that workers have to end by themselves
REPORT_WAIT = 3.0  # seconds until a lost connection is seen as an ended process as well
POLL = 0.02  # seconds between two looks at a process


def assemble(config: EngineConfig, path: Path) -> ProcessGroup | None:
    """The ranks that share the model in the directory `path`, met and told the settings; None if
    there is only one.

    Raises ValueError for a model that cannot be cut so, too few GPUs, or a `torchrun` with another
    number of processes; no process is started then.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return None
    require_fit(read_config(path), size)
    require_devices(config)
    group = torchrun_group(size) if started_by_torchrun() else Team(size)
    group.send(json.dumps(dataclasses.asdict(config)).encode())
    return group


def require_devices(config: EngineConfig) -> None:
    """Raise ValueError unless each rank of this host has a GPU of its own. A CPU can be shared,
    but there the steps of several ranks cannot be recorded (`enforce_eager=False`)."""
    size, device = config.tensor_parallel_size, choose_device(config.device)
    if device.type == "cuda":
        num_here = int(os.environ["LOCAL_WORLD_SIZE"]) if started_by_torchrun() else size
        num_gpus = torch.cuda.device_count()
        if num_here > num_gpus:
            raise ValueError(
                f"tensor_parallel_size={size} needs {num_here} GPUs on this machine, and PyTorch"
                f" sees {num_gpus}; lower it, or take device='cpu'"
            )
    elif config.enforce_eager is False:
        raise ValueError(
            f"enforce_eager=False: on a CPU the sums of tensor_parallel_size={size} cannot be"
            " recorded; leave enforce_eager out (nothing is lost)"
        )


@contextmanager
def closed_on_error(group: ProcessGroup | None) -> Iterator[None]:
    """Workers of an engine that could not be built do not wait for it."""
    try:
        yield
    except BaseException:
        if group is not None:
            group.close()
        raise


def agree(config: EngineConfig, group: ProcessGroup) -> EngineConfig:
    """The settings that suit all ranks: as many KV blocks as the one with the least memory has,
    and requests no longer than they hold. Ranks that count differently would read and write
    blocks that others do not have."""
    sizes = [set_value(config.num_kv_blocks), set_value(config.max_model_len)]
    num_kv_blocks, max_model_len = group.smallest(sizes)
    return replace(config, num_kv_blocks=num_kv_blocks, max_model_len=max_model_len)


def started_by_torchrun() -> bool:
    """Whether this process is one of several that `torchrun` has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def torchrun_group(size: int) -> ProcessGroup:
    """The group of all processes that `torchrun` has started, maybe on several hosts. Raises
    ValueError unless there are `size` of them."""
    started = int(os.environ["WORLD_SIZE"])
    if started != size:
        raise ValueError(
            f"tensor_parallel_size={size}, but torchrun has started {started} processes; make the"
            " two equal"
        )
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == size
    return ProcessGroup(store, rank, size, local)


# -- processes of this host -------------------------------------------------------------------


class Worker:
    """A process that is one rank of this host's group."""

    def __init__(self, rank: int, size: int, store: Path, threads: int) -> None:
        self.rank = rank
        # No pickle, no `fork`, nothing of the caller's main module: this works in a notebook too.
        command = [
            sys.executable,
            "-m",
            "minivllm.assembly.worker",
            str(store),
            str(rank),
            str(size),
        ]
        self.process = subprocess.Popen(
            command,
            env=_environment(rank, threads),
            stdin=subprocess.PIPE,  # it ends when this end is closed, by whatever
            stdout=subprocess.PIPE,  # for its last words
            start_new_session=True,  # Ctrl-C in a terminal is for the leader alone
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None

    def last_words(self) -> str:
        """Why it ended. It must have."""
        assert self.process.stdout is not None, "it was started with a pipe"
        report = self.process.stdout.read().decode(errors="replace").strip()
        code = self.process.returncode
        return report or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")

    def end(self, grace: float) -> None:
        """Tell it to end, and kill it if it has not after so many seconds. Twice is fine."""
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
        "NUMBA_NUM_THREADS": str(threads),  # its threads would wait in loops for a core
    }


class Team(ProcessGroup):
    """The leader's group, the other ranks of which are processes that it has started.

    Raises GroupError, with a worker's last words, where one does not start.
    """

    def __init__(self, size: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="minivllm-")
        self.num_threads = torch.get_num_threads()
        # The cores are shared as well.
        threads = max(1, self.num_threads // size)
        store = Path(self.folder) / "store"
        self.workers: list[Worker] = []
        # Also if nobody calls `close`: at the interpreter's end, or when this is forgotten.
        weakref.finalize(self, _end_all, self.workers, self.folder)
        try:
            for rank in range(1, size):
                self.workers.append(Worker(rank, size, store, threads))
            # A file is the meeting point: no port that somebody else may have.
            file_store = dist.FileStore(str(store), size)
            self._await_arrival(file_store)
            super().__init__(file_store, 0, size, local=True)
        except BaseException:
            _end_all(self.workers, self.folder)
            raise
        torch.set_num_threads(threads)

    def _await_arrival(self, store: Any) -> None:
        """Wait until every worker has begun, or one has ended."""
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        for worker in self.workers:
            while not store.check([f"worker {worker.rank}"]):
                if worker.has_ended:
                    raise GroupError(f"worker {worker.rank} did not start: {worker.last_words()}")
                if time.monotonic() > deadline:
                    raise GroupError(f"worker {worker.rank} did not start within {START_TIMEOUT}")
                time.sleep(POLL)

    def cause_of(self, error: Exception) -> GroupError:
        """The worker's error, if one has ended; otherwise none answers any more."""
        deadline = time.monotonic() + REPORT_WAIT
        while not any(worker.has_ended for worker in self.workers) and time.monotonic() < deadline:
            time.sleep(POLL)
        reports = {worker.rank: worker.last_words() for worker in self.workers if worker.has_ended}
        silent = [str(worker.rank) for worker in self.workers if not worker.has_ended]
        _end_all(self.workers, self.folder, grace=0)
        # Those that only lost the others, or gave up waiting, are not the cause.
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
        """Raise if a worker is gone."""
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
