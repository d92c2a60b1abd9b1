"""Capture the launches of a decode step once, replay them as one: CUDA Graphs.

A decode step of a small model launches some hundred kernels of a few microseconds each, and
launching them takes the host longer than running them takes the GPU. A graph is the list of
those launches with all their arguments, kept on the device. It buys its speed with three rules:
fixed shapes (so batches are padded to a few sizes, the buckets), fixed addresses (so each step's
numbers are copied to where the graph reads them), no host in between (so nothing may look at a
result). Does not handle steps with prompts in them, whose shapes are always new. Notebook 08.

On a CPU a `Tape` with the same interface takes the graph's place: it keeps the rules and gains
nothing. Source: CUDA C++ Programming Guide, "CUDA Graphs"; padding to buckets as in vLLM.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """The batch sizes that get a graph, in rising order, none twice.

    They are 1, 2, 4, then every multiple of 8, as far as they are below `max_num_seqs` (at least
    1), and `max_num_seqs` itself: the largest batch has its graph, whatever its size is.
    20 -> [1, 2, 4, 8, 16, 20]; 16 -> [1, 2, 4, 8, 16]; 3 -> [1, 2, 3].
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
    """Copy a decode step to where the graph reads it, and turn the places behind it to padding.

    Only `row_ids` and `starts` differ between decode steps of one bucket. `static` has places
    for as many rows as the bucket, `plan` has `num_decodes` rows, no more. In a place that is
    left over, the row is `padding_row` and the start 0, whatever stood there before. The
    tensors of `static` stay the same objects at the same addresses; `plan` is not changed.
    Rows 5 and 3 at positions 17 and 4, in a bucket of four with the padding row 9:
    row_ids [5, 3, 9, 9], starts [17, 4, 0, 0].
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
    results: list[Tensor]  # the tensors that came back the first time: later calls read these

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(result.shape)) for result in self.results)
        return f"Call({self.operation.overloadpacket.__name__} -> {shapes})"


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a tensor, or of a list, tuple or dict with tensors in it, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


# Operations whose result is for the host: a number, or a shape that depends on numbers.
# In inference mode some come under the name that the user called.
READS_NUMBER = ("item", "_local_scalar_dense", "is_nonzero", "equal")
COUNTS_NUMBERS = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
ASKS_THE_HOST = READS_NUMBER + COUNTS_NUMBERS


def asks_the_host(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation cannot go on before the device has told the host a number."""
    name = operation.overloadpacket.__name__
    # x[mask] has as many elements as the mask has ones.
    has_mask = any(tensor.dtype == torch.bool for tensor in tensors_in(args[1:]))
    return name in ASKS_THE_HOST or (name.startswith("index") and has_mask)


def refusal(operation: Any) -> CaptureError:
    """The error for an operation that asks the host, with its name and a way out."""
    return CaptureError(
        f"{operation.overloadpacket.__name__} reads a number on the host while a graph is"
        " captured; a graph cannot wait for it. Keep it on the device, or hand it in"
    )


class Tape(TorchDispatchMode):
    """What `torch.cuda.CUDAGraph` is on a GPU, in the tensor operations of a CPU.

    As a context it runs and records every operation; `replay` runs them again on the same
    tensors and puts the results where they were. Like a graph it refuses to read a number on
    the host, and like a graph it never asks Python again: an `if` goes the way it went.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __repr__(self) -> str:
        return f"Tape({len(self.calls)} calls)"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise the first tape waits seconds for the import of PyTorch's compiler, which is
        # then told to let tapes alone; it never meets one here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """PyTorch hands in every operation inside the context; what this returns is its result."""
        return self.record(func, args, kwargs or {})

    def record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, `operation(*args, **kwargs)`, and return what it returns.

        A `Call` with the operation, its arguments and the tensors that came back (`tensors_in`)
        goes to the end of `calls`: the very tensors, not copies of them. An operation that
        `asks_the_host` is not run: its `refusal` is raised, and `calls` stays as it is.
        """
        if asks_the_host(operation, args):
            raise refusal(operation)
        out = operation(*args, **kwargs)
        # No copies: a later call reads this very memory, and every replay fills it anew.
        self.calls.append(Call(operation, args, kwargs, tensors_in(out)))
        return out

    def replay(self) -> None:
        """Run all operations again, in order, each with the arguments that it had.

        Each of the tensors that come back (`tensors_in`) is copied into the one that came back
        the first time (`Call.results`), for that is where later calls, and the caller, read it.
        One that lies at that address already (`data_ptr`: a view, or a result written in
        place) needs no copy. `calls` does not change.
        """
        for call in self.calls:
            out = call.operation(*call.args, **call.kwargs)
            for old, new in zip(call.results, tensors_in(out), strict=True):
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
    with no_garbage_collection(), torch.cuda.graph(graph, pool=pool):
        return graph, function()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Until the end, Python collects no garbage: in it could be the graphs of an engine that was
    closed, and giving those back is not allowed while another one is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# A step's shape, as a key: the number of rows for decodes (8); other policies choose their own.
Bucket = int | tuple[str, int]


class BucketPolicy(Protocol):
    """Which steps can be replayed. Filled by `DecodeBuckets`, on a GPU also by
    `gpu.prompt_buckets.PromptBuckets`."""

    plans: dict[Bucket, StepPlan]  # for each bucket the step that its graphs read, small to large

    def bucket_of(self, plan: StepPlan) -> Bucket | None: ...
    def fill(self, static: StepPlan, plan: StepPlan) -> None: ...


class DecodeBuckets:
    """Steps of decodes alone, padded to a few numbers of rows."""

    def __init__(self, max_num_seqs: int, max_seq_len: int, device: torch.device) -> None:
        self.sizes = bucket_sizes(max_num_seqs)
        # The last of the runner's rows is reserved for padding.
        self.padding_row = max_num_seqs
        self.plans: dict[Bucket, StepPlan] = {
            size: padding_plan([1] * size, self.padding_row, max_seq_len, device)
            for size in self.sizes
        }

    def bucket_of(self, plan: StepPlan) -> Bucket | None:
        """The number of rows that holds the step, or None for a step that needs another form."""
        return bucket_for(plan.num_decodes, self.sizes) if plan.is_decode else None

    def fill(self, static: StepPlan, plan: StepPlan) -> None:
        """See the function `fill`."""
        fill(static, plan, self.padding_row)


class StepGraphs:
    """The graphs of an engine's steps, one for each function and bucket.

    Invariant: a graph reads its step from `plans[bucket]` and nothing else that changes its
    address; each plan's columns lie where they lay when its graphs were captured. `loaded` is
    the step that was copied there last.
    """

    def __init__(
        self, max_num_seqs: int, max_seq_len: int, device: torch.device, *more: BucketPolicy
    ) -> None:
        """Make room for decodes of up to `max_num_seqs` rows, and for the buckets of `more`."""
        decodes = DecodeBuckets(max_num_seqs, max_seq_len, device)
        self.buckets = decodes.sizes
        self.policies: list[BucketPolicy] = [decodes, *more]
        self.plans = {
            bucket: plan for policy in self.policies for bucket, plan in policy.plans.items()
        }
        self.max_rows = max(len(plan.params) for plan in self.plans.values())
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.loaded: StepPlan | None = None
        self.functions: dict[str, GraphedFunction] = {}

    def wrap(self, function: Callable[[StepPlan], Tensor]) -> GraphedFunction:
        """`function(plan)` with graphs for the steps that can be replayed."""
        graphed = GraphedFunction(self, function)
        self.functions[function.__name__] = graphed
        return graphed

    def run(self, function: Callable[[StepPlan], Tensor], plan: StepPlan) -> Tensor:
        """`function(plan)`, from a graph if the function was wrapped."""
        return self.functions.get(function.__name__, function)(plan)

    def load(self, plan: StepPlan) -> Bucket | None:
        """Copy the step to the plan of its bucket; return the bucket, or None for a step that
        must run without a graph."""
        for policy in self.policies:
            bucket = policy.bucket_of(plan)
            if bucket is None:
                continue
            if plan is not self.loaded:
                policy.fill(self.plans[bucket], plan)
                self.loaded = plan
            return bucket
        return None

    @torch.inference_mode()  # as every step of the engine
    def capture_all(self) -> None:
        """Capture every function for every bucket, the largest first: its memory then serves the
        others. What was not captured runs without a graph."""
        for function in self.functions.values():
            for bucket in reversed(self.plans):
                function.capture(bucket)

    def clear(self) -> None:
        """Release all graphs. Functions that are still held run without one."""
        for function in self.functions.values():
            function.captured.clear()
        self.functions.clear()


class GraphedFunction:
    """A function of a step that replays its graph where there is one for the step's bucket.

    Invariant: every graph of `captured` ends with a copy of the function's result to the first
    rows of `result`, which all buckets share and which keeps its address.
    """

    def __init__(self, graphs: StepGraphs, function: Callable[[StepPlan], Tensor]) -> None:
        self.graphs = graphs
        self.function = function
        self.captured: dict[Bucket, Graph] = {}
        self.result: Tensor | None = None  # [graphs.max_rows, ...]

    def __repr__(self) -> str:
        return f"GraphedFunction(captured for {list(reversed(self.captured))})"

    def capture(self, bucket: Bucket) -> None:
        """Capture the function for the steps of one bucket: `captured[bucket]`.

        The function runs once as it is, so that whatever a first call compiles or sets up is
        done, and once inside the graph. Both times it gets the bucket's plan,
        `graphs.plans[bucket]`. Every replay leaves the function's result, R rows, in the first R
        rows of `self.result`. The first capture makes `self.result`: `graphs.max_rows` rows, in
        shape, dtype and device otherwise like the function's result.
        """
        plan = self.graphs.plans[bucket]
        result = self.function(plan)
        if self.result is None:
            self.result = result.new_empty((self.graphs.max_rows, *result.shape[1:]))
        target = self.result[: len(result)]
        # The copy is part of the graph: without it, each graph would leave its result elsewhere.
        self.captured[bucket], _ = capture(
            lambda: target.copy_(self.function(plan)), self.graphs.pool
        )

    def __call__(self, plan: StepPlan) -> Tensor:
        """Return what `function(plan)` returns: one row for each of the plan's `row_ids`.

        A step whose bucket was captured (`graphs.load`) is replayed, and its rows of
        `self.result` are the answer, without the padding: valid until the next call. Any other
        step runs the function itself.
        """
        bucket = self.graphs.load(plan)
        if bucket not in self.captured:
            return self.function(plan)
        self.captured[bucket].replay()
        assert self.result is not None, "it is there once something was captured"
        return self.result[: len(plan.row_ids)]
