"""A worker: one rank of an engine, in its own process, that follows the leader.

`distributed.workers.Team` starts it as `python -m minivllm.assembly.worker`; under `torchrun` the
command line of every rank but the first comes here. Not built in the course.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from typing import BinaryIO

import torch
import torch.distributed as dist

from minivllm.assembly.parts import build_rank_runner, load_rank
from minivllm.checkpoint.hub import resolve_model
from minivllm.config import EngineConfig
from minivllm.distributed.process_group import GroupError, ProcessGroup
from minivllm.distributed.workers import READY, torchrun_group
from minivllm.leader import Follower


def main(arguments: list[str]) -> int:
    """Run as one rank of a `Team`: STORE RANK SIZE. Return the exit code."""
    store_path, rank, size = arguments
    leader = take_stdout()
    # Ctrl-C is for the leader, which tells its workers what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_leader()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        store = dist.FileStore(store_path, int(size))
        leader.write(READY)
        work(ProcessGroup(store, int(rank), int(size), local=True))
    except Exception as error:
        if not isinstance(error, GroupError):  # that one has its cause in another rank
            traceback.print_exc()
        leader.write(f"{type(error).__name__}: {error}".encode())
        return 1
    return 0


def work_under_torchrun() -> int:
    """Run as the rank that torchrun's environment names. Return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(torchrun_group(int(os.environ["WORLD_SIZE"])))
    return 0


def work(group: ProcessGroup) -> None:
    """Receive the settings, load this rank's shard, and compute until the leader ends it."""
    config = EngineConfig(**json.loads(group.receive()))
    path = resolve_model(config.model_path or config.model)
    runner = build_rank_runner(load_rank(config, path, group, progress=False))
    try:
        Follower(runner).follow(group.receive)
    finally:
        runner.close()
    group.close()


def take_stdout() -> BinaryIO:
    """Return the pipe to the leader; everything else this process prints goes to standard error."""
    leader = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return leader


def end_with_leader() -> None:
    """End at once when the leader closes its end of standard input, even in the middle of a sum."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    # At once: a regular exit waits for connections to ranks that have ended.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
