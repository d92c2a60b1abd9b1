"""A group of processes that compute together: PyTorch's collectives, as one rank sees them.

Tensors on GPUs go through NCCL; tensors on a CPU and the leader's messages go through gloo. Each
group has its own connections and does not touch PyTorch's default group, of which a process has
only one, so two engines can work in one process. On one host only the loopback interface is used;
between hosts nothing is encrypted, so the network must be trusted. Not built in the course.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

# A message up to this length is one broadcast; a longer one needs a second for the rest.
MESSAGE_BYTES = 4096
LENGTH_BYTES = 8
# For the ranks to meet and to load the model; some disks are slow.
START_TIMEOUT = timedelta(minutes=30)
# For a worker's next message; an engine may be idle for any time.
IDLE_TIMEOUT = timedelta(days=365)


class GroupError(RuntimeError):
    """A collective failed: another rank has ended or did not answer in time."""


class ProcessGroup:
    """One rank's end of a group. Every rank makes the same calls in the same order.

    After a failure the ranks are out of step for good: every further call raises the same error.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, local: bool) -> None:
        """Meet the other ranks at the `store` and wait for all of them; `local` means that all
        are on this host. Only messages can be exchanged before `use`."""
        self.rank = rank
        self.size = size
        self.local = local
        self.timeout = START_TIMEOUT
        self.failure: Exception | None = None
        self.store = store
        # Messages and tensors have separate connections, so that one is never taken for the other.
        self.control: Any = self._gloo("control")
        self.data: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def use(self, device: torch.device, timeout: float) -> torch.device:
        """Connect the ranks for tensors on this rank's device of that kind; from here on a
        collective takes at most `timeout` seconds. Returns the device.

        Raises ValueError if this rank has no GPU.
        """
        device = _device_of_rank(device)
        self.timeout = timedelta(seconds=timeout)
        if device.type != "cuda":
            self.data = self._gloo("data")
            return device
        if self.local:
            # For good: NCCL connects in the first collective.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", _loopback())
        torch.cuda.set_device(device)
        store = dist.PrefixStore("data", self.store)
        nccl: Any = dist.ProcessGroupNCCL  # PyTorch's type hints do not know this form
        self.data = nccl(store, self.rank, self.size, self.timeout)
        return device

    def _gloo(self, name: str) -> dist.ProcessGroupGloo:
        store = dist.PrefixStore(name, self.store)
        with _gloo_interface(_loopback() if self.local else None):
            return dist.ProcessGroupGloo(store, self.rank, self.size, self.timeout)

    # -- failures -----------------------------------------------------------------------------

    def _wait(self, start: Callable[[], Any]) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            work = start()
            if work is not None:  # NCCL's is already ordered by the stream
                work.wait()
        except RuntimeError as error:
            self.failure = self.cause_of(error)
            raise self.failure from error

    def cause_of(self, error: Exception) -> GroupError:
        """Return the likely cause of a failed collective, as far as this rank can know it."""
        return GroupError(f"another rank has ended, or did not answer in time ({error})")

    def check(self) -> None:
        """Raise if another rank is known to have ended."""
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Fail for good if the body raises, because the other ranks are no longer in step."""
        try:
            yield
        except Exception as error:
            if self.failure is None:
                self.failure = GroupError(f"a step broke off ({error!r}); make a new LLM")
            raise

    # -- tensors ------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum all ranks' `x`, in place; returns `x`."""
        self._wait(lambda: self.data.allreduce([x], in_stream(dist.AllreduceOptions())))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `x [...]` in the order of the ranks: `[R, ...]`."""
        # gloo's thread writes into it, which PyTorch 2.5 refuses for a tensor of inference mode.
        with torch.inference_mode(False):
            gathered = x.new_empty(self.size, *x.shape)
        self._wait(lambda: self._gather_into(gathered, x.contiguous()))
        return gathered

    def _gather_into(self, gathered: Tensor, x: Tensor) -> Any:
        options = in_stream(AllgatherOptions())
        # The one private name here: the public `allgather` copies what it has gathered, in the
        # logits 78 MB for 256 requests.
        gather = getattr(self.data, "_allgather_base", None)
        if gather is None:
            return self.data.allgather([list(gathered)], [x], options)
        # Both libraries want the parts side by side along the first dimension.
        return gather(gathered.flatten(0, 1), x, options)

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite `x` with the leader's on all ranks; returns `x`."""
        self._wait(lambda: self.data.broadcast([x], in_stream(dist.BroadcastOptions())))
        return x

    # -- the host's messages --------------------------------------------------------------------

    def smallest(self, numbers: list[int]) -> list[int]:
        """Return the smallest of all ranks for each number: of [5, 9] and [7, 3] it is [5, 3]."""
        least = torch.tensor(numbers)
        self._wait(lambda: self.control.allreduce(least, dist.ReduceOp.MIN))
        return [int(number) for number in least]

    def send(self, message: bytes) -> None:
        """Send a message to all workers. Only the leader calls this."""
        header = len(message).to_bytes(LENGTH_BYTES, "little")
        start = message[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
        self._broadcast_bytes(header + start)
        if len(message) > MESSAGE_BYTES:
            self._broadcast_bytes(message[MESSAGE_BYTES:])

    def receive(self) -> bytes:
        """Wait for the leader's next message, however long it takes. Only workers call this."""
        first = self._broadcast_bytes(bytes(LENGTH_BYTES + MESSAGE_BYTES))
        length = int.from_bytes(first[:LENGTH_BYTES], "little")
        message = first[LENGTH_BYTES:]
        if length <= MESSAGE_BYTES:
            return message[:length]
        return message + self._broadcast_bytes(bytes(length - MESSAGE_BYTES))

    def _broadcast_bytes(self, message: bytes) -> bytes:
        """Return the leader's message; the workers' must have the same length."""
        x = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.timeout = self.timeout if self.rank == 0 else IDLE_TIMEOUT
        self._wait(lambda: self.control.broadcast([x], options))
        return x.numpy().tobytes()

    def close(self) -> None:
        """End the workers and close the connections. The group cannot be used afterwards."""
        if self.rank == 0 and self.failure is None:
            with suppress(GroupError):
                self.send(b"")
        # NCCL's connections would otherwise wait for the other ranks. Graphs that hold them have
        # been released by now (`ModelRunner.close`): NCCL waits a minute for those.
        getattr(self.data, "abort", lambda: None)()
        self.data = None
        self.control = None
        self.failure = GroupError("this group is closed")


def in_stream(options: Any) -> Any:
    """Ask NCCL for a collective in the stream of the operations around it. In a stream of its own
    each would wait for the other: 10.9 us instead of 7.8 us for a small sum on two H200."""
    if hasattr(options, "asyncOp"):  # PyTorch before 2.8 has no choice
        options.asyncOp = False
    return options


@contextmanager
def _gloo_interface(name: str | None) -> Iterator[None]:
    """Make gloo bind to this network interface; None leaves the choice to gloo."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before
        else:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _loopback() -> str:
    """The loopback interface: "lo" on Linux, "lo0" on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _device_of_rank(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(
            f"device={str(device)!r} is a single GPU, but there are several ranks; use 'cuda'"
        )
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"tensor_parallel_size: this host has {count} GPUs, none for its rank {index}; use"
            f" {count} or fewer, or device='cpu'"
        )
    return torch.device("cuda", index)
