"""Ranks of tensor parallelism as threads of this process: real collectives, no start-up time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.distributed as dist

from minivllm.process_group import GroupError, ProcessGroup
from minivllm.worker import work

CPU = torch.device("cpu")


def on_ranks(size, function, timeout=20.0):
    """`function(group)` on each rank at the same time; returns the results, by rank."""
    store = dist.HashStore()

    def run(rank):
        group = ProcessGroup(store, rank, size, local=True)
        group.use(CPU, timeout)
        return function(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


class ThreadTeam(ProcessGroup):
    """Stands where `workers.Team` stands; its workers are threads."""

    def __init__(self, size):
        store = dist.HashStore()
        self.threads = [
            threading.Thread(target=self._work, args=(store, rank, size)) for rank in range(1, size)
        ]
        for thread in self.threads:
            thread.start()
        super().__init__(store, 0, size, local=True)

    def _work(self, store, rank, size):
        with suppress(GroupError):  # if the leader breaks off
            work(ProcessGroup(store, rank, size, local=True))

    def close(self):
        super().close()
        for thread in self.threads:
            thread.join(30)
