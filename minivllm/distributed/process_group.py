"""A group of processes that compute together: PyTorch's collectives, as one rank sees them.

Tensors on GPUs go through NCCL, those on a CPU through gloo; so do the leader's messages. Each
group has connections of its own and touches no global state of PyTorch, so that two engines can
work in one process. On one host only the loopback interface is used; between hosts nothing is
encrypted: the network must be one that you trust. Given (no notebook builds it).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

LOOPBACK = "127.0.0.1"
# A message up to this long travels at once; of a longer one the rest comes behind.
MESSAGE_BYTES = 4096
LENGTH_BYTES = 8
# To meet, and to load the model: some disks are slow.
START_TIMEOUT = timedelta(minutes=30)
# A worker of an engine that has nothing to do waits for its next message.
PATIENCE = timedelta(days=365)


class GroupError(RuntimeError):
    """A collective failed: another rank is gone, or did not come in time."""


class ProcessGroup:
    """One rank's end of a group. Every rank makes the same calls in the same order.

    After a failure the ranks are apart for good: every further call raises it again.
    """

    def __init__(self, store: Any, rank: int, size: int, local: bool) -> None:
        """Meets the other ranks at the `store`, and waits for all of them. `local`: all are on
        this host. Only messages can be exchanged, until `use`."""
        self.rank, self.size, self.local = rank, size, local
        self.timeout = START_TIMEOUT
        self.failure: Exception | None = None
        # Called before the connections are closed: NCCL waits a minute for graphs that hold on to
        # them.
        self.on_close: list[Callable[[], None]] = []
        self.store = store
        # Two connections: a message must never be taken for a tensor.
        self.control: Any = self._gloo(dist.PrefixStore("control", store))
        self.data: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def use(self, device: torch.device, timeout: float) -> torch.device:
        """From here on exchange tensors on this rank's device of that kind, and wait for each
        other `timeout` seconds at most. Returns the device.

        Raises ValueError if there is no GPU for this rank.
        """
        device = _device_of_rank(device)
        self.timeout = timedelta(seconds=timeout)
        store = dist.PrefixStore("data", self.store)
        self.data = self._nccl(store, device) if device.type == "cuda" else self._gloo(store)
        return device

    def _gloo(self, store: Any) -> Any:
        if not self.local:
            return dist.ProcessGroupGloo(store, self.rank, self.size, self.timeout)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self.timeout
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        return gloo(store, self.rank, self.size, options)

    def _nccl(self, store: Any, device: torch.device) -> Any:
        if self.local:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    # -- when something goes wrong --------------------------------------------------------------

    def _wait(self, start: Callable[[], Any]) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            work = start()
            if work is not None:  # NCCL's is in the order of the stream already
                work.wait()
        except RuntimeError as error:
            self.failure = self.cause_of(error)
            raise self.failure from error

    def cause_of(self, error: Exception) -> GroupError:
        """What lies behind a failed collective, as far as this rank can know."""
        return GroupError(f"another rank is gone, or did not answer in time ({error})")

    def check(self) -> None:
        """Raise if another rank is known to be gone."""
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Whoever leaves the body early leaves the others waiting, and that cannot be mended."""
        try:
            yield
        except Exception as error:
            if self.failure is None:
                self.failure = GroupError(f"a step broke off ({error!r}); make a new LLM")
            raise

    # -- tensors ------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, for each of them, in the memory of `x`."""
        self._wait(lambda: self.data.allreduce([x], in_stream(dist.AllreduceOptions())))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x [...]`, in the order of the ranks: `[R, ...]`, for each of them."""
        # Side by side along the first dimension, as both libraries want it.
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        options = in_stream(AllgatherOptions())
        self._wait(lambda: self.data._allgather_base(gathered, x.contiguous(), options))
        return gathered.unflatten(0, (self.size, len(x)))

    def broadcast(self, x: Tensor) -> Tensor:
        """The leader's `x`, for each of them, in the memory of `x`."""
        self._wait(lambda: self.data.broadcast([x], in_stream(dist.BroadcastOptions())))
        return x

    # -- the host's messages --------------------------------------------------------------------

    def smallest(self, numbers: list[int]) -> list[int]:
        """Number by number the smallest of all ranks, for each of them."""
        least = torch.tensor(numbers)
        self._wait(lambda: self.control.allreduce(least, dist.ReduceOp.MIN))
        return [int(number) for number in least]

    def send(self, message: bytes) -> None:
        """Say something to all workers. Only the leader does."""
        body = bytearray(message)
        first = torch.zeros(LENGTH_BYTES + MESSAGE_BYTES, dtype=torch.uint8)
        first[:LENGTH_BYTES].copy_(_bytes_of(len(body).to_bytes(LENGTH_BYTES, "little")))
        start = body[:MESSAGE_BYTES]
        if start:
            first[LENGTH_BYTES : LENGTH_BYTES + len(start)].copy_(_bytes_of(start))
        self._pass_on(first)
        if len(body) > MESSAGE_BYTES:
            self._pass_on(_bytes_of(body[MESSAGE_BYTES:]))

    def receive(self) -> bytes:
        """Wait, as long as it takes, for what the leader says next. Only workers do."""
        first = torch.zeros(LENGTH_BYTES + MESSAGE_BYTES, dtype=torch.uint8)
        self._pass_on(first)
        raw = bytes(first.numpy())
        length, start = int.from_bytes(raw[:LENGTH_BYTES], "little"), raw[LENGTH_BYTES:]
        if length <= MESSAGE_BYTES:
            return start[:length]
        rest = torch.zeros(length - MESSAGE_BYTES, dtype=torch.uint8)
        self._pass_on(rest)
        return start + bytes(rest.numpy())

    def _pass_on(self, message: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self.timeout if self.rank == 0 else PATIENCE
        self._wait(lambda: self.control.broadcast([message], options))

    def close(self) -> None:
        """Send the workers home and give the connections back; no other call may follow."""
        if self.rank == 0 and self.failure is None:
            with suppress(GroupError):
                self.send(b"")
        for release in self.on_close:
            release()
        # NCCL's would otherwise wait for the others.
        getattr(self.data, "abort", lambda: None)()
        self.data = self.control = None
        self.failure = GroupError("this group is closed")


def in_stream(options: Any) -> Any:
    """Ask NCCL for a collective in the stream of the operations around it. In a stream of its own
    each one would wait for them and they for it, which costs more than a small sum."""
    if hasattr(options, "asyncOp"):  # PyTorch before 2.8 knows its own stream only
        options.asyncOp = False
    return options


def _device_of_rank(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(f"device={str(device)!r} is one GPU, for several ranks; take 'cuda'")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"tensor_parallel_size: rank {index} of this host has no GPU, there are {count}; take"
            f" {count} or fewer, or device='cpu'"
        )
    return torch.device("cuda", index)


def _bytes_of(message: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
