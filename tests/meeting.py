"""Ranks as threads that meet in one place: a `tensor_parallel.Group` for each, without connections.

Ranks that make different calls are told apart at once, where real ones would wait for each other.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch


class Apart(Exception):
    """The ranks do not make the same calls."""


class Seat:
    """One rank's end of the meeting; `calls` counts what it has done."""

    def __init__(self, rank, size, table, barrier):
        self.rank, self.size = rank, size
        self.table, self.barrier = table, barrier
        self.calls = []

    def exchange(self, call, x=None):
        """What all ranks bring to this call, by rank."""
        self.table[self.rank] = (call, None if x is None else x.detach().clone())
        self.barrier.wait()
        found = list(self.table)
        self.barrier.wait()
        if {name for name, _ in found} != {call}:
            raise Apart(", ".join(f"rank {rank}: {name}" for rank, (name, _) in enumerate(found)))
        self.calls.append(call)
        return [brought for _, brought in found]

    def all_reduce(self, x):
        return x.copy_(sum(self.exchange("all_reduce", x)))

    def all_gather(self, x):
        return torch.stack(self.exchange("all_gather", x))

    def broadcast(self, x):
        return x.copy_(self.exchange("broadcast", x)[0])


def together(size, function):
    """`function(group)` on each rank at the same time: the results by rank, or the first error."""
    table, barrier = [None] * size, threading.Barrier(size, timeout=10)

    def run(rank):
        group, result, error = Seat(rank, size, table, barrier), None, None
        try:
            result = function(group)
        except Exception as raised:  # told by the caller, in its own thread
            error = raised
        if not isinstance(error, Apart):
            try:
                # The end is a call as well: ranks that still wait for this one notice.
                group.exchange("error" if error else "no call, its function has ended")
            except Apart as apart:
                error = error or apart
        return result, error

    with ThreadPoolExecutor(size) as threads:
        ends = list(threads.map(run, range(size)))
    errors = [error for _, error in ends if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Apart)):
        raise error
    return [result for result, _ in ends]
