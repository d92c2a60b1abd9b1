"""Device rows, and one step's input gathered from them.

Each running request owns a row of every tensor in `Rows`: its tokens, its block table, its
sampling settings. The host writes only what changed; a step reads its whole input out of the
rows and writes the sampled tokens back, so a token id never has to visit the host before the
next step. Leaves out running the step (`model_runner`). Notebook 06.

Tensor letters: T tokens, N chunks of a step, S of them that sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from minivllm.request import Request, SamplingParams

# Fills `gather`'s gap: block tables [N, max_blocks], owners [T], positions [T], block size ->
# slots [T]. The module `ops` has it in plain torch, `kernels` in Triton (Notebook 07).
SlotMapping = Callable[[Tensor, Tensor, Tensor, int], Tensor]

BiasEntry = tuple[int, float, float]  # token id, value, first position without it


@dataclass(frozen=True)
class SamplingRows:
    """The settings of the rows that sample in one step; the runner fills it from its rows.

    The flags, and what is None, are known on the host and only save work: a flag that is True
    without need changes no token. `settings[rows]` takes a slice or row numbers [M] int64.
    """

    temperature: Tensor  # [N] float32; 0: greedy, the rest of the row is then ignored
    top_k: Tensor  # [N] int64, tokens; 0: off
    top_p: Tensor  # [N] float64, in (0, 1]; 1: off
    min_p: Tensor  # [N] float32, in [0, 1]; 0: off
    seed: Tensor  # [N] int64
    any_random: bool  # some temperature is above 0
    any_filter: bool  # some row has top_k, top_p or min_p on
    biases: Biases | None = None  # None: no row asks
    penalties: Penalties | None = None  # None: no row asks

    def __getitem__(self, rows: slice | Tensor) -> SamplingRows:
        """How to choose the token of some rows. Without biases and penalties: those are applied
        to the logits of the whole step, before its rows are taken apart."""
        return replace(
            self,
            biases=None,
            penalties=None,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
        )


@dataclass(frozen=True)
class Biases:
    """Numbers to add to single logits of one step: E entries, of any of its N rows."""

    rows: Tensor  # [E] int64, which of the N rows
    token_ids: Tensor  # [E] int64
    values: Tensor  # [E] float32, may be -inf


@dataclass(frozen=True)
class Penalties:
    """The penalties of one step and what they look at, for the M of its N rows that ask."""

    rows: Tensor  # [M] int64, which of the N rows
    token_ids: Tensor  # [M, L] int32, prompt and answer from position 0; undefined behind them
    num_prompt_tokens: Tensor  # [M] int64
    repetition: Tensor  # [M] float32, above 0; 1: off
    presence: Tensor  # [M] float32; 0: off
    frequency: Tensor  # [M] float32; 0: off


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the chosen token of M rows and of the K most probable ones."""

    token_ids: Tensor  # [M, 1 + K] int64, the chosen one first
    logprobs: Tensor  # [M, 1 + K] float32, natural logarithms
    ranks: Tensor  # [M, 1 + K] int64, 1: no token is more probable


# -- device rows ------------------------------------------------------------------------------


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens so far change the logits of the next one."""
    others = params.presence_penalty != 0 or params.frequency_penalty != 0
    return params.repetition_penalty != 1 or others


def bias_entries(request: Request) -> list[BiasEntry]:
    """What to add to which logits, and until which position.

    A prompt of 4, logit_bias {7: 1.5}, min_tokens 3 and stop token 2 give (7, 1.5, inf) and
    (2, -inf, 7): the tokens at positions 4, 5 and 6 cannot be the stop token.
    """
    params = request.sampling_params
    biases = (params.logit_bias or {}).items()
    entries: list[BiasEntry] = [(token_id, value, math.inf) for token_id, value in biases]
    if params.min_tokens > 0:
        end = request.num_prompt_tokens + params.min_tokens
        entries += [(token_id, -math.inf, end) for token_id in sorted(request.stop_token_ids)]
    return entries


class Rows:
    """One row of every tensor per running request.

    Invariant: `row_of` maps each request that holds a row to a different row number; all
    others are in `free_rows`. A row's first `num_blocks[row]` table entries are written.
    `penalized` and `biases_of` hold rows in use, those that ask for it.
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
        self.top_p = zeros(max_num_seqs, dtype=torch.float64)
        self.min_p = zeros(max_num_seqs, dtype=torch.float32)
        self.seed = zeros(max_num_seqs, dtype=torch.int64)
        self.num_prompt_tokens = zeros(max_num_seqs, dtype=torch.int64)
        self.repetition_penalty = zeros(max_num_seqs, dtype=torch.float32)
        self.presence_penalty = zeros(max_num_seqs, dtype=torch.float32)
        self.frequency_penalty = zeros(max_num_seqs, dtype=torch.float32)
        self.penalized: set[int] = set()
        self.biases_of: dict[int, list[BiasEntry]] = {}
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
        self.seed[row] = request.seed
        params = request.sampling_params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        if has_penalties(params):
            self.penalized.add(row)
            self.num_prompt_tokens[row] = request.num_prompt_tokens
            self.repetition_penalty[row] = params.repetition_penalty
            self.presence_penalty[row] = params.presence_penalty
            self.frequency_penalty[row] = params.frequency_penalty
        if entries := bias_entries(request):
            self.biases_of[row] = entries
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
            self.penalized.discard(row)
            self.biases_of.pop(row, None)

    def settings(self, plan: StepPlan) -> SamplingRows:
        """The sampling settings of the S rows that sample."""
        row_ids, params = plan.row_ids[plan.sampling], plan.params
        return SamplingRows(
            temperature=self.temperature[row_ids],
            top_k=self.top_k[row_ids],
            top_p=self.top_p[row_ids],
            min_p=self.min_p[row_ids],
            seed=self.seed[row_ids],
            any_random=any(p.temperature > 0 for p in params),
            any_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
            biases=self._biases(plan),
            penalties=self._penalties(plan),
        )

    def _biases(self, plan: StepPlan) -> Biases | None:
        entries = [
            (index, token_id, value)
            for index, (row, position) in enumerate(zip(plan.rows, plan.ends))
            for token_id, value, end in self.biases_of.get(row, ())
            if position < end
        ]
        if not entries:
            return None
        rows, token_ids, values = (torch.tensor(column) for column in zip(*entries))
        on_device = partial(Tensor.to, device=self.seed.device, non_blocking=True)
        return Biases(on_device(rows), on_device(token_ids), on_device(values.float()))

    def _penalties(self, plan: StepPlan) -> Penalties | None:
        asking = [index for index, row in enumerate(plan.rows) if row in self.penalized]
        if not asking:
            return None
        rows = torch.tensor(asking).to(self.seed.device, non_blocking=True)
        row_ids = plan.row_ids[plan.sampling][rows]
        # Read from the device: the token sampled by the step before may not be on the host yet.
        longest = max(plan.ends[index] for index in asking)
        return Penalties(
            rows=rows,
            token_ids=self.token_ids[:, :longest][row_ids],
            num_prompt_tokens=self.num_prompt_tokens[row_ids],
            repetition=self.repetition_penalty[row_ids],
            presence=self.presence_penalty[row_ids],
            frequency=self.frequency_penalty[row_ids],
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
    rows: list[int]  # their row numbers, on the host
    ends: list[int]  # the position of the token that each samples, on the host
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


def gather(rows: Rows, plan: StepPlan, block_size: int, slot_mapping: SlotMapping) -> StepInput:
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
        slot_mapping=slot_mapping(block_table, owners, positions, block_size),
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
