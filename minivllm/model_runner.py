"""From chunks to token ids: the engine's side of the device.

Each running request owns a row of the device tensors below (`Rows`): its tokens, its block
table, its sampling settings. A step gathers its input from the rows and scatters the sampled
tokens back into them, so a token id never has to visit the host before the next step. Leaves
out who computes what (the scheduler) and how operations are done (`ops`). Notebook 06.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.request import Chunk, Request, SamplingParams


class RunnerOps(Protocol):
    """The operations the runner needs. Filled by the module `ops` (plain torch), on a GPU by
    `kernels` (Notebook 07). Shapes and dtypes: see `ops`."""

    slot_mapping: Callable[..., Tensor]
    store_kv: Callable[..., None]
    attention: Callable[..., Tensor]


@dataclass
class SamplingRows:
    """Settings of the N requests that sample in a step, one element each, on the device."""

    temperature: Tensor  # [N] float32; 0: greedy
    top_k: Tensor  # [N] int64; 0: off
    top_p: Tensor  # [N] float32; 1: off
    min_p: Tensor  # [N] float32; 0: off
    seed: Tensor  # [N] int64
    positions: Tensor  # [N] int64, of the tokens that are sampled
    # What the host knows of the batch; lets a sampler skip work, never changes its result.
    any_random: bool
    any_filter: bool


# Fills the runner's last gap: logits [N, V] float32 -> token ids [N] int64. The engine hands
# in `sampler.sample` (Notebook 10).
Sample = Callable[[Tensor, SamplingRows], Tensor]


def greedy(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The most probable token of each row `[N, V] -> [N]`, whatever the settings."""
    return logits.argmax(dim=-1)


# -- how much memory the KV cache gets ----------------------------------------------------

CPU_MEMORY_SHARE = 0.25  # of the memory that is available, so that a laptop does not swap
CPU_MEMORY_CAP = 2**30  # bytes
GPU_MEMORY_SHARE = 0.9  # of all memory


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values.

    SmolLM2-135M (30 layers, 3 KV heads of 64) in bfloat16 with blocks of 16 tokens:
    `30 * 2 * 16 * 3 * 64 * 2 = 368640`.
    """
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


def num_blocks_that_fit(budget_bytes: int, block_bytes: int, max_blocks: int) -> int:
    """Blocks for a KV cache of at most `budget_bytes`, and `max_blocks` at most."""
    return max(0, min(budget_bytes // block_bytes, max_blocks))


def longest_request(num_blocks: int, block_size: int, wanted: int | None, model_max: int) -> int:
    """The `max_model_len` (tokens) to use: `wanted` by the user or what the model was trained
    for, and no more than `num_blocks` blocks hold.

    Raises ValueError, with the length that would fit, where the user wanted more.
    """
    fits = num_blocks * block_size
    if wanted is not None and wanted > model_max:
        raise ValueError(
            f"max_model_len={wanted} is more than the model was trained for ({model_max} tokens);"
            f" lower it to {model_max}"
        )
    if wanted is not None and wanted > fits:
        raise ValueError(
            f"max_model_len={wanted} does not fit the KV cache of {num_blocks} blocks of"
            f" {block_size} tokens; max_model_len={fits} would fit. Lower it, or raise"
            " num_kv_blocks or memory_utilization"
        )
    return min(wanted or model_max, fits)


# -- device rows ------------------------------------------------------------------------------


class Rows:
    """One row of every tensor per running request.

    Invariant: `row_of` maps each request that holds a row to a different row number; all
    others are in `free_rows`. A row's first `num_blocks[row]` table entries are written.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, max_blocks: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = zeros(max_num_seqs, max_model_len, dtype=torch.int32)
        self.block_table = zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self.temperature = zeros(max_num_seqs, dtype=torch.float32)
        self.top_k = zeros(max_num_seqs, dtype=torch.int64)
        self.top_p = zeros(max_num_seqs, dtype=torch.float32)
        self.min_p = zeros(max_num_seqs, dtype=torch.float32)
        self.seed = zeros(max_num_seqs, dtype=torch.int64)
        self.row_of: dict[str, int] = {}
        self.free_rows = list(reversed(range(max_num_seqs)))
        self.num_blocks = [0] * max_num_seqs

    def __repr__(self) -> str:
        return f"Rows({len(self.row_of)} used, {len(self.free_rows)} free)"

    def write(self, request: Request) -> int:
        """Give the request a row, copy its tokens and settings there; returns the row number."""
        row = self.free_rows.pop()
        self.row_of[request.request_id] = row
        self.num_blocks[row] = 0
        self.token_ids[row, : len(request.token_ids)] = torch.tensor(
            request.token_ids, dtype=torch.int32
        )
        params = request.sampling_params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = request.seed
        return row

    def write_new_blocks(self, request: Request, row: int) -> None:
        """Copy what the block table has gained since the last step."""
        start, end = self.num_blocks[row], len(request.block_table)
        if end > start:
            new = torch.tensor(request.block_table[start:], dtype=torch.int32)
            self.block_table[row, start:end] = new
            self.num_blocks[row] = end

    def release(self, request: Request) -> None:
        """Take the row back. A request without one is fine."""
        row = self.row_of.pop(request.request_id, None)
        if row is not None:
            self.free_rows.append(row)

    def settings(self, row_ids: Tensor, positions: Tensor, params: list[SamplingParams]) -> Any:
        """The sampling settings of some rows; `params` are the same on the host."""
        return SamplingRows(
            temperature=self.temperature[row_ids],
            top_k=self.top_k[row_ids],
            top_p=self.top_p[row_ids],
            min_p=self.min_p[row_ids],
            seed=self.seed[row_ids],
            positions=positions,
            any_random=any(p.temperature > 0 for p in params),
            any_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        )


# -- one step's input -------------------------------------------------------------------------


@dataclass
class StepPlan:
    """What a step computes, N chunks with T tokens in all; chunks that decode come first."""

    row_ids: Tensor  # [N] int64
    starts: Tensor  # [N] int64, position of each chunk's first token
    lengths: Tensor  # [N] int64, tokens
    sampling: Tensor  # [S] int64, which of the N chunks sample
    params: list[SamplingParams]  # of those S
    num_tokens: int  # T
    num_decodes: int  # chunks that decode


@dataclass
class StepInput:
    """What the model and its attention read in one step; T tokens of N requests."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64, from 0
    slot_mapping: Tensor  # [T] int64, where each token's key and value go
    query_starts: Tensor  # [N + 1] int32, request i owns tokens query_starts[i] to [i + 1]
    seq_lens: Tensor  # [N] int32, keys that the last token of each request sees
    block_table: Tensor  # [N, max_blocks] int32
    last: Tensor  # [S] int64, the tokens after which one is sampled
    num_decodes: int  # the first requests, with one token each


def token_owners(lengths: Tensor, num_tokens: int) -> Tensor:
    """Which chunk each token belongs to: `[N] -> [T]`; lengths 1, 3 give 0 1 1 1."""
    chunks = torch.arange(len(lengths), device=lengths.device)
    # With the total given, no one has to wait for the device to add the lengths up.
    return torch.repeat_interleave(chunks, lengths, output_size=num_tokens)


def token_positions(starts: Tensor, lengths: Tensor, owners: Tensor) -> Tensor:
    """The position of each token in its own text `[T]`; starts 9, 4 with lengths 1, 3 give
    9 4 5 6."""
    # A token's place in the step, less its chunk's first place, counts up from 0 in each chunk.
    first_places = lengths.cumsum(0) - lengths
    places = torch.arange(len(owners), device=owners.device)
    return places - first_places[owners] + starts[owners]


def query_starts(lengths: Tensor) -> Tensor:
    """Where each chunk's tokens begin in the step, and the end: lengths 1, 3 give 0 1 4."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def gather(rows: Rows, plan: StepPlan, block_size: int, ops: RunnerOps) -> StepInput:
    """Build a step's input out of the rows, on the device alone.

    The forebears' `prepare_prefill` and `prepare_decode` in one: a decoding request is a
    chunk of one token.
    """
    owners = token_owners(plan.lengths, plan.num_tokens)
    positions = token_positions(plan.starts, plan.lengths, owners)
    starts = query_starts(plan.lengths)
    block_table = rows.block_table[plan.row_ids]
    return StepInput(
        input_ids=rows.token_ids[plan.row_ids[owners], positions],
        positions=positions,
        slot_mapping=ops.slot_mapping(block_table, owners, positions, block_size),
        query_starts=starts,
        seq_lens=(plan.starts + plan.lengths).to(torch.int32),
        block_table=block_table,
        last=(starts[1:] - 1)[plan.sampling].long(),
        num_decodes=plan.num_decodes,
    )


def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    """Write the sampled tokens `[S]` into the rows, each behind its request's last token."""
    row_ids = plan.row_ids[plan.sampling]
    ends = (plan.starts + plan.lengths)[plan.sampling]
    rows.token_ids[row_ids, ends] = token_ids.to(torch.int32)


@dataclass
class Pending:
    """The tokens of a step that may still be running."""

    token_ids: Tensor  # [S] int64, on the device

    def wait(self) -> list[int]:
        """Wait for the device; the token ids of the chunks that sample, in order."""
        return [int(token_id) for token_id in self.token_ids.tolist()]


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
        *,
        model_config: ModelConfig,
        num_kv_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the rows and the KV cache; `model` is a `model.CausalLM` or acts like one."""
        self.model, self.ops, self.sample = model, ops, sample
        self.block_size = block_size
        self.device = device
        self.scale = model_config.head_dim**-0.5
        max_blocks = -(-max_model_len // block_size)
        self.rows = Rows(max_num_seqs, max_model_len, max_blocks, device)
        # Zeros and not just any memory: attention multiplies masked entries by 0, and
        # 0 times a leftover NaN is NaN.
        self.kv_cache = torch.zeros(
            (
                model_config.num_layers,
                2,
                num_kv_blocks,
                block_size,
                model_config.num_kv_heads,
                model_config.head_dim,
            ),
            dtype=dtype,
            device=device,
        )

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Pending:
        """Start one step; does not wait for the device. Chunks that decode come first."""
        if not chunks:
            return Pending(torch.empty(0, dtype=torch.int64))
        return Pending(self.step(self.plan(chunks)))

    def release(self, request: Request) -> None:
        """The request no longer runs (finished, preempted or aborted): its row is free."""
        self.rows.release(request)

    def plan(self, chunks: Sequence[Chunk]) -> StepPlan:
        """Bring the rows up to date and describe the step. The only part that touches the host."""
        row_ids = [self._row(chunk.request) for chunk in chunks]
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        # One small copy to the device instead of four.
        table = torch.tensor(
            [row_ids, [chunk.start for chunk in chunks], [chunk.length for chunk in chunks]]
        ).to(self.device, non_blocking=True)
        return StepPlan(
            row_ids=table[0],
            starts=table[1],
            lengths=table[2],
            sampling=torch.tensor(sampling, dtype=torch.int64).to(self.device, non_blocking=True),
            params=[chunks[index].request.sampling_params for index in sampling],
            num_tokens=sum(chunk.length for chunk in chunks),
            num_decodes=sum(chunk.is_decode for chunk in chunks),
        )

    def _row(self, request: Request) -> int:
        """The request's row, written if it has none yet, with its new blocks."""
        row = self.rows.row_of.get(request.request_id)
        if row is None:
            row = self.rows.write(request)
        self.rows.write_new_blocks(request, row)
        return row

    def step(self, plan: StepPlan) -> Tensor:
        """From the rows to the rows: everything a step does on the device. Returns the sampled
        token ids `[S]`."""
        inputs = gather(self.rows, plan, self.block_size, self.ops)
        hidden = self.model(inputs.input_ids, inputs.positions, self._attend(inputs))
        if not plan.params:
            return inputs.last  # a chunk in the middle of a prompt: nothing is sampled
        logits = self.model.logits(hidden[inputs.last])
        positions = (plan.starts + plan.lengths)[plan.sampling]
        rows = self.rows.settings(plan.row_ids[plan.sampling], positions, plan.params)
        token_ids = self.sample(logits, rows)
        scatter(self.rows, plan, token_ids)
        return token_ids

    def _attend(self, inputs: StepInput) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """The function the model calls in each layer: store the new keys and values, then
        attend to all of the request's."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_cache, v_cache = self.kv_cache[layer]
            self.ops.store_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
            return self.ops.attention(
                q,
                k_cache,
                v_cache,
                inputs.block_table,
                inputs.query_starts,
                inputs.seq_lens,
                inputs.num_decodes,
                self.scale,
            )

        return attend
