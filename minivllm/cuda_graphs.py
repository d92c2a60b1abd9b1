"""Capture the launches of a decode step once, replay them as one: CUDA Graphs.

A decode step of a small model launches some hundred kernels of a few microseconds each, and
launching them takes the host longer than running them takes the GPU. A graph is the list of
those launches with all their arguments, kept on the device. It buys its speed with three rules:
fixed shapes (so batches are padded to a few sizes, the buckets), fixed addresses (so each step's
numbers are copied to where the graph reads them), no host in between (so nothing may look at a
result). Leaves out steps with prompts in them, whose shapes are always new. Notebook 08.

On a CPU a `Tape` with the same interface takes the graph's place: it keeps the rules and gains
nothing. Source: CUDA C++ Programming Guide, "CUDA Graphs"; padding to buckets as in vLLM.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from minivllm.rows import StepPlan
from minivllm.step_input import padding_plan

# -- buckets --------------------------------------------------------------------------------------

SMALL_BUCKETS = (1, 2, 4)
BUCKET_STEP = 8  # beyond: at most 7 rows of padding


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that get a graph, ascending; the last one is `max_num_seqs` itself.

    20 -> [1, 2, 4, 8, 16, 20]; 4 -> [1, 2, 4]; 3 -> [1, 2, 3].
    """
    sizes = [*SMALL_BUCKETS, *range(BUCKET_STEP, max_num_seqs, BUCKET_STEP)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def bucket_for(num_rows: int, buckets: list[int]) -> int | None:
    """The smallest bucket that holds `num_rows`, or None if none does.

    9 of [1, 2, 4, 8, 16, 20] -> 16; 16 -> 16; 21 -> None.
    """
    index = bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else None


def fill(static: StepPlan, plan: StepPlan, padding_row: int) -> None:
    """Copy a decode step's numbers to where the graph reads them; the rest becomes padding.

    In place: the tensors of `static` keep their addresses. Two rows into a bucket of four:
    row_ids [5, 3, P, P], starts [17, 4, 0, 0], with P the padding row.
    """
    num_rows = plan.num_decodes
    static.row_ids[:num_rows].copy_(plan.row_ids)
    static.starts[:num_rows].copy_(plan.starts)
    # What the step before left there would be computed once more, and its token overwritten.
    static.row_ids[num_rows:].fill_(padding_row)
    static.starts[num_rows:].fill_(0)


# -- graphs ---------------------------------------------------------------------------------------


class Graph(Protocol):
    """Launches that were captured. Filled by `torch.cuda.CUDAGraph`, on a CPU by `Tape`."""

    def replay(self) -> None: ...


class CaptureError(RuntimeError):
    """Something that a graph cannot hold was done while it was captured."""


@dataclass
class Call:
    """One operation of a tape."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]  # as they were when the tape was made: the storages stay


# Operations whose result is for the host: a number, or a shape that depends on numbers.
ASKS_THE_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")


def asks_the_host(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation cannot go on before the device has told the host a number."""
    name = operation.overloadpacket.__name__
    # x[mask] has as many elements as the mask has ones.
    has_mask = any(
        isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_flatten(args[1:])[0]
    )
    return name in ASKS_THE_HOST or (name.startswith("index") and has_mask)


class Tape(TorchDispatchMode):
    """What `torch.cuda.CUDAGraph` is on a GPU, in the tensor operations of a CPU.

    As a context it runs and records every operation; `replay` runs them again on the same
    tensors and puts the results where they were. Like a graph it refuses to read a number on
    the host, and like a graph it never asks Python again: an `if` goes the way it went.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and note it."""
        if asks_the_host(func, args):
            raise CaptureError(
                f"{func.overloadpacket.__name__} reads a number on the host while a graph is"
                " captured; a graph cannot wait for it. Keep it on the device, or hand it in"
            )
        out = func(*args, **(kwargs or {}))
        results = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
        self.calls.append(Call(func, args, kwargs or {}, results))
        return out

    def replay(self) -> None:
        """Run all operations again; nothing is allocated that anybody keeps."""
        for call in self.calls:
            out = call.operation(*call.args, **call.kwargs)
            fresh = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
            for old, new in zip(call.results, fresh, strict=True):
                # Views, and results written in place, are where they belong already.
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def capture(function: Callable[[], Tensor], pool: Any) -> tuple[Graph, Tensor]:
    """Run `function` once and keep its launches; returns the graph and the function's result,
    whose memory every replay fills anew.

    On a GPU, `pool` gives the memory of everything in between; graphs that never run at the same
    time can share it. On a CPU it is None.
    """
    if pool is None:
        tape = Tape()
        with tape:
            return tape, function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        return graph, function()


class StepGraphs:
    """The graphs of an engine's decode steps, one for each function and bucket.

    Invariant: a graph reads its step from `plans[bucket]` and nothing else that changes its
    address; each plan's columns lie where they lay when its graphs were captured. `loaded` is
    the step that was copied there last.
    """

    def __init__(self, max_num_seqs: int, max_seq_len: int, device: torch.device) -> None:
        self.buckets = bucket_sizes(max_num_seqs)
        # The rows' last one is nobody's.
        self.padding_row = max_num_seqs
        self.plans = {
            size: padding_plan([1] * size, self.padding_row, max_seq_len, device)
            for size in self.buckets
        }
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.loaded: StepPlan | None = None
        self.functions: list[GraphedFunction] = []

    def wrap(self, function: Callable[[StepPlan], Tensor]) -> GraphedFunction:
        """`function(plan)` with graphs for the steps that can be replayed."""
        self.functions.append(GraphedFunction(self, function))
        return self.functions[-1]

    def load(self, plan: StepPlan) -> int | None:
        """Copy the step to the plan of its bucket; returns the bucket, or None for a step that
        must run without a graph."""
        bucket = bucket_for(plan.num_decodes, self.buckets) if plan.is_decode else None
        if bucket is not None and plan is not self.loaded:
            fill(self.plans[bucket], plan, self.padding_row)
            self.loaded = plan
        return bucket

    def capture_all(self) -> None:
        """Capture every function for every bucket, the largest first: its memory then serves the
        others. What was not captured runs without a graph."""
        for function in self.functions:
            for size in reversed(self.buckets):
                function.capture(size)


class GraphedFunction:
    """A function of a step that replays its graph where there is one for the step's bucket."""

    def __init__(self, graphs: StepGraphs, function: Callable[[StepPlan], Tensor]) -> None:
        self.graphs, self.function = graphs, function
        self.captured: dict[int, Graph] = {}
        self.result: Tensor | None = None  # of all buckets, at one address

    @torch.inference_mode()
    def __call__(self, plan: StepPlan) -> Tensor:
        """What `function(plan)` gives, `[N, ...]`; valid until the next call."""
        bucket = self.graphs.load(plan)
        if bucket not in self.captured:
            return self.function(plan)
        self.captured[bucket].replay()
        assert self.result is not None, "it is there once something was captured"
        return self.result[: plan.num_decodes]

    @torch.inference_mode()
    def capture(self, bucket: int) -> None:
        """Capture the function for the steps of one bucket."""
        plan = self.graphs.plans[bucket]
        # Once without: kernels are compiled and libraries take their memory at the first call.
        result = self.function(plan)
        if self.result is None:
            shape = (self.graphs.buckets[-1], *result.shape[1:])
            self.result = torch.empty(shape, dtype=result.dtype, device=result.device)
        target = self.result[:bucket]
        self.captured[bucket], _ = capture(
            lambda: target.copy_(self.function(plan)), self.graphs.pool
        )
