"""One step on the device: from the scheduler's chunks to sampled token ids.

    launch(chunks)                  what the engine calls; does not wait for the device
    ├─ plan(chunks)                 the rows brought up to date: the only part on the host
    └─ step(plan)                   everything else, as functions of device tensors
       ├─ forward(plan)             gather the input, run the model: logits
       └─ sample_tokens(plan, …)    choose the tokens, scatter them into the rows

Does not decide who computes what (see `scheduler`) or how an operation is done (see `ops`).
Notebook 06.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minivllm.block_manager import blocks_for
from minivllm.config import EngineConfig, known
from minivllm.kv_cache import allocate_kv_cache
from minivllm.model_config import ModelConfig
from minivllm.request import INVALID_TOKEN, Chunk, Logprob, Request
from minivllm.rows import Rows, SamplingRows, StepPlan, TokenLogprobs, to_device
from minivllm.step_input import gather, padding_plan, scatter


class RunnerOps(Protocol):
    """The operations the runner needs. Filled by the module `ops` (plain torch), on a GPU by
    `gpu.ops` (kernels of notebook 07). Shapes and dtypes: see `ops`."""

    slot_mapping: Callable[..., Tensor]
    store_kv: Callable[..., None]
    attention: Callable[..., Tensor]


# Chooses tokens: logits [N, V], the N rows' settings, and the positions [N] int64 of the tokens
# to choose -> token ids [N] int64. The engine hands in `sampler.sample` (Notebook 10).
Sample = Callable[[Tensor, SamplingRows, Tensor], Tensor]
# For the M rows that want to know how probable their token was: logits [M, V] float32 as the
# model gave them, chosen tokens [M] int64, number of alternatives K. The engine hands in
# `logits_processors.rank_tokens` (Notebook 10).
RankTokens = Callable[[Tensor, Tensor, int], TokenLogprobs]
# A part of a step: reads the rows that a plan names, returns one row for each chunk that samples.
StepFunction = Callable[[StepPlan], Tensor]


class Graphs(Protocol):
    """Runs parts of a step, from a recording where it has one. Filled by `NoGraphs`, on a GPU by
    `cuda_graphs.StepGraphs` (Notebook 08)."""

    def wrap(self, function: StepFunction) -> StepFunction: ...
    def capture_all(self) -> None: ...
    def run(self, function: StepFunction, plan: StepPlan) -> Tensor: ...
    def clear(self) -> None: ...


class NoGraphs:
    """Every part of a step is launched operation by operation."""

    def wrap(self, function: StepFunction) -> StepFunction:
        """The function itself."""
        return function

    def capture_all(self) -> None:
        """Nothing is recorded."""

    def run(self, function: StepFunction, plan: StepPlan) -> Tensor:
        """`function(plan)`."""
        return function(plan)

    def clear(self) -> None:
        """There is nothing to release."""


class Event(Protocol):
    """Something on the device that can be waited for. Filled by `torch.cuda.Event`, with several
    ranks by `leader.WatchedEvent` (Notebook 09)."""

    def synchronize(self) -> None: ...


def greedy(logits: Tensor, settings: SamplingRows, positions: Tensor) -> Tensor:
    """The most probable token of each row, `[N, V] -> [N]`, whatever the settings."""
    return logits.argmax(dim=-1)


@dataclass
class Pending:
    """The tokens of a step that may still be running, S chunks of which sample."""

    token_ids: Tensor  # [S] int64, on the host once `copied`
    ranked: TokenLogprobs | None = None  # of the rows that ask; None: no row does
    num_logprobs: Sequence[int | None] = ()  # [S] alternatives; None: off
    copied: Event | None = None  # when the tokens are on the host; None: at once

    @classmethod
    def nothing(cls) -> Pending:
        """The result of a step in which no chunk samples."""
        return cls(torch.empty(0, dtype=torch.int64))

    @classmethod
    def fetch(
        cls,
        token_ids: Tensor,
        ranked: TokenLogprobs | None = None,
        num_logprobs: Sequence[int | None] = (),
    ) -> Pending:
        """Start copying the tokens to the host, behind the step that computes them."""
        # Memory of its own: a later step may be launched before this copy is read.
        if not token_ids.is_cuda:
            return cls(token_ids.clone(), ranked, num_logprobs)
        on_host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        on_host.copy_(token_ids, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(on_host, ranked, num_logprobs, copied)

    def wait(self) -> list[int]:
        """Wait for the device; the token ids of the chunks that sample, in order."""
        if self.copied is not None:
            self.copied.synchronize()  # the copy is behind the step, and nothing else
        return [int(token_id) for token_id in self.token_ids.tolist()]

    def logprobs(self) -> list[dict[int, Logprob] | None]:
        """Wait for the device; for each chunk that samples its token and the most probable
        alternatives, by token id, or None where none were asked for."""
        if self.ranked is None:
            return [None] * len(self.token_ids)
        columns = (self.ranked.token_ids, self.ranked.logprobs, self.ranked.ranks)
        # Rows ask for different numbers: each has as many columns as the one that wants most.
        rows = zip(*(column.tolist() for column in columns))
        return [None if k is None else _first(k + 1, *next(rows)) for k in self.num_logprobs]


def _first(
    count: int, token_ids: list[int], logprobs: list[float], ranks: list[int]
) -> dict[int, Logprob]:
    """The first `count` entries; the chosen token may be among the most probable ones again."""
    rows = list(zip(token_ids, logprobs, ranks))[:count]
    return {token_id: Logprob(logprob, rank) for token_id, logprob, rank in rows}


class ModelRunner:
    """Holds the model, the rows and the KV cache; runs steps.

    Invariant: `kv_cache[layer][0 or 1][block]` holds keys or values of the positions that a
    block table maps to `block`; everything else in it is finite, so that a masked read of it
    adds nothing.
    """

    def __init__(
        self,
        model: Any,
        ops: RunnerOps,
        sample: Sample,
        model_config: ModelConfig,
        config: EngineConfig,
        rank_tokens: RankTokens | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Allocate the rows and the KV cache.

        `model` is a `model.CausalLM` or acts like one; of `config`, every setting is filled in.
        Without `rank_tokens`, no request may ask for logprobs; without `graphs`, nothing is
        recorded.
        """
        self.model = model
        self.ops = ops
        self.sample = sample
        self.rank_tokens = rank_tokens
        self.graphs = graphs or NoGraphs()
        self.block_size = config.block_size
        self.device = torch.device(config.device)
        self.scale = model_config.head_dim**-0.5
        max_len = known(config.max_model_len)
        self.rows = Rows(
            known(config.max_num_seqs),
            max_len,
            blocks_for(max_len, self.block_size),
            self.device,
            padding_block=known(config.num_kv_blocks),
        )
        self.kv_cache = allocate_kv_cache(model_config, config)

    # -- before and after all steps ---------------------------------------------------------

    def warm_up(self) -> None:
        """Compile the kernels, then record the steps, so that no request waits for either."""
        if self.device.type == "cuda":
            self._step_of_padding()
        self.graphs.wrap(self.forward)
        self.graphs.wrap(self.forward_and_sample)
        self.graphs.capture_all()

    @torch.inference_mode()
    def _step_of_padding(self) -> None:
        """A step with a prompt and a decode in it, neither of which belongs to a request."""
        row = self.rows.padding_row
        max_seq_len = self.rows.token_ids.shape[1] - 1
        lengths = [1, 2] if row > 1 and max_seq_len > 1 else [1]
        self.step(padding_plan(lengths, row, max_seq_len, self.device))

    def close(self) -> None:
        """Release the graphs: they hold this runner as it holds them. Twice is fine."""
        self.graphs.clear()

    # -- one step ---------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Pending:
        """Start one step; does not wait for the device. Chunks that decode come first."""
        if not chunks:
            return Pending.nothing()
        return self.step(self.plan(chunks))

    def plan(self, chunks: Sequence[Chunk]) -> StepPlan:
        """Bring the rows up to date and describe the step. The only part that touches the host."""
        row_ids = self.rows.update([chunk.request for chunk in chunks])
        starts = [chunk.start for chunk in chunks]
        lengths = [chunk.length for chunk in chunks]
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        # One small copy to the device instead of four.
        numbers = to_device(row_ids + starts + lengths + sampling, torch.int64, self.device)
        sizes = [len(chunks)] * 3 + [len(sampling)]
        row_column, start_column, length_column, sampling_column = numbers.split(sizes)
        return StepPlan(
            row_ids=row_column,
            starts=start_column,
            lengths=length_column,
            sampling=sampling_column,
            params=[chunks[index].request.sampling_params for index in sampling],
            rows=[row_ids[index] for index in sampling],
            ends=[chunks[index].end for index in sampling],
            num_tokens=sum(lengths),
            num_decodes=sum(chunk.is_decode for chunk in chunks),
            max_query_len=max(lengths),
            max_seq_len=max(chunk.end for chunk in chunks),
            is_plain=self.rows.are_plain,
        )

    def step(self, plan: StepPlan) -> Pending:
        """From the rows to the rows: everything a step does on the device."""
        if not plan.params:  # only middles of prompts
            self.forward(plan)
            return Pending.nothing()
        if plan.is_plain:
            return Pending.fetch(self.graphs.run(self.forward_and_sample, plan))
        # Settings that a graph cannot hold: the sampler runs behind the recorded forward pass.
        logits = self.graphs.run(self.forward, plan)
        token_ids = self.sample_tokens(plan, logits)
        num_logprobs = [params.logprobs for params in plan.params]
        ranked = self._rank(logits, token_ids.clamp(min=0), num_logprobs)
        return Pending.fetch(token_ids, ranked, num_logprobs)

    def forward_and_sample(self, plan: StepPlan) -> Tensor:
        """The sampled tokens `[S]`, which are in the rows as well."""
        return self.sample_tokens(plan, self.forward(plan))

    def forward(self, plan: StepPlan) -> Tensor:
        """The first half of a step: logits `[S, V]` of the chunks that sample, in the plan's
        order; `[0, ...]` if no chunk samples. All keys and values are stored on the way.

        `self.model(input_ids, positions, attend)` returns the hidden states `[T, hidden]`;
        `self.model.logits` turns hidden states of some tokens into logits. For each layer the
        model calls `attend(layer, q, k, v)` with the new queries, keys and values, and expects
        the attention's answer `[T, H, D]`. `self.kv_cache[layer]` holds the layer's keys and
        values; `self.ops` has `store_kv` and `attention`, whose scores are multiplied by
        `self.scale`.

        Example: chunks of 3 and 4 tokens, both sample: logits of the tokens in places 2 and 6.
        """
        inputs = gather(self.rows, plan, self.block_size, self.ops.slot_mapping)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_cache, v_cache = self.kv_cache[layer]
            # Stored first: a token attends to its own key as well.
            self.ops.store_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
            return self.ops.attention(q, k_cache, v_cache, inputs.metadata, self.scale)

        hidden = self.model(inputs.input_ids, inputs.positions, attend)
        # A product with the vocabulary costs as much as many layers: only where it is needed.
        if not plan.params:
            return hidden[:0]
        return self.model.logits(hidden if plan.is_decode else hidden[inputs.last])

    def sample_tokens(self, plan: StepPlan, logits: Tensor) -> Tensor:
        """The second half: choose the tokens `[S]`, and write them into the rows as well.

        Where the logits are not finite, INVALID_TOKEN is returned in the token's place; the rows
        get the token, since the next step may run before the host notices.
        """
        positions = (plan.starts + plan.lengths)[plan.sampling]
        token_ids = self.sample(logits, self.rows.settings(plan), positions)
        scatter(self.rows, plan, token_ids)
        # A hidden state that overflowed makes all logits of its row NaN: one of them tells.
        is_valid = logits.gather(1, token_ids[:, None])[:, 0].isfinite()
        return torch.where(is_valid, token_ids, INVALID_TOKEN)

    def _rank(
        self, logits: Tensor, token_ids: Tensor, num_logprobs: list[int | None]
    ) -> TokenLogprobs | None:
        """Log-probabilities for the rows that ask, each with as many as any of them wants."""
        asking = [index for index, k in enumerate(num_logprobs) if k is not None]
        if not asking:
            return None
        assert self.rank_tokens is not None, "a request asks for logprobs: hand in rank_tokens"
        most = max(k for k in num_logprobs if k is not None)
        rows = to_device(asking, torch.int64, self.device)
        return self.rank_tokens(logits[rows].float(), token_ids[rows], most)

    # -- between steps ----------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Free the row of a request that no longer runs (finished, preempted or aborted)."""
        self.rows.release(request)

    def wipe(self, block_ids: Sequence[int]) -> None:
        """Make blocks finite again that a request with overflowed numbers has written."""
        blocks = to_device(block_ids, torch.int64, self.device)
        self.kv_cache.index_fill_(2, blocks, 0)
