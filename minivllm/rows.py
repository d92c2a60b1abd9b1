"""Device rows: what the device knows about each running request, and which rows a step uses.

Each running request owns a row of every tensor in `Rows`: its tokens, its block table, its
sampling settings. The host writes only what changed. Does not read a step's input from the rows
(see `step_input`) or run the step (see `model_runner`). Notebook 06.

Tensor letters: T tokens, N chunks of a step, S of them that sample; in `SamplingRows` and
its parts N rows that sample, M of them that use a setting, E entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from minivllm.request import Request, SamplingParams

# Columns with the same name as a field of `SamplingParams`.
SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

# -- sampling settings of a step's rows ------------------------------------------------------------

BiasEntry = tuple[int, float, float]  # token id, value, first position without it


@dataclass(frozen=True)
class SamplingRows:
    """The settings of the rows that sample in one step; the runner fills it from its rows.

    The flags and the fields that may be None are known on the host and only save work: a flag that
    is True without need changes no token. `settings[rows]` takes a slice or row numbers [M] int64.
    """

    temperature: Tensor  # [N] float32; 0: greedy, which ignores the rest of the row
    top_k: Tensor  # [N] int64, tokens; 0: off
    top_p: Tensor  # [N] float64, in (0, 1]; 1: off
    min_p: Tensor  # [N] float32, in [0, 1]; 0: off
    seed: Tensor  # [N] int64
    any_random: bool  # some temperature is above 0
    any_filter: bool  # some row uses top_k, top_p or min_p
    biases: Biases | None = None  # None: no row has any
    penalties: Penalties | None = None  # None: no row has any

    def __getitem__(self, rows: slice | Tensor) -> SamplingRows:
        """Return the settings of some rows, without biases and penalties: those are applied to the
        logits of the whole step, before its rows are split."""
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
    """Numbers to add to single logits of one step: E entries, in any of its N rows."""

    rows: Tensor  # [E] int64, which of the N rows
    token_ids: Tensor  # [E] int64
    values: Tensor  # [E] float32, may be -inf


@dataclass(frozen=True)
class Penalties:
    """The penalties of one step and their tokens, for the M of its N rows that have any."""

    rows: Tensor  # [M] int64, which of the N rows
    token_ids: Tensor  # [M, L] int32, prompt and answer from position 0, then undefined
    num_prompt_tokens: Tensor  # [M] int64
    repetition: Tensor  # [M] float32, above 0; 1: off
    presence: Tensor  # [M] float32; 0: off
    frequency: Tensor  # [M] float32; 0: off


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the chosen token and of the K most probable tokens, for M rows."""

    token_ids: Tensor  # [M, 1 + K] int64, the chosen one first
    logprobs: Tensor  # [M, 1 + K] float32, natural logarithms
    ranks: Tensor  # [M, 1 + K] int64, 1: no token is more probable


def has_filters(params: SamplingParams) -> bool:
    """Whether `params` use top_k, top_p or min_p."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens so far change the logits of the next token."""
    others = params.presence_penalty != 0 or params.frequency_penalty != 0
    return params.repetition_penalty != 1 or others


def bias_entries(request: Request) -> list[BiasEntry]:
    """Return what to add to which logits, and up to which position.

    A prompt of 4 tokens, logit_bias {7: 1.5}, min_tokens 3 and stop token 2 give (7, 1.5, inf)
    and (2, -inf, 7): the tokens at positions 4, 5 and 6 cannot be the stop token.
    """
    params = request.sampling_params
    biases = (params.logit_bias or {}).items()
    entries: list[BiasEntry] = [(token_id, value, math.inf) for token_id, value in biases]
    if params.min_tokens > 0:
        end = request.num_prompt_tokens + params.min_tokens
        entries += [(token_id, -math.inf, end) for token_id in sorted(request.stop_token_ids)]
    return entries


# -- device rows ------------------------------------------------------------------------------


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, without waiting for the work that runs there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # Only copies from pinned memory are asynchronous. PyTorch does not reuse that memory before
    # the copy is done.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


@dataclass
class StepPlan:
    """What a step computes: N chunks with T tokens in all, decoding chunks first."""

    # On the device:
    row_ids: Tensor  # [N] int64
    starts: Tensor  # [N] int64, position of each chunk's first token
    lengths: Tensor  # [N] int64, tokens
    sampling: Tensor  # [S] int64, which of the N chunks sample
    # On the host:
    params: list[SamplingParams]  # of the S chunks that sample
    rows: list[int]  # row numbers of these S chunks
    ends: list[int]  # position of the token that each of them samples
    num_tokens: int  # T
    num_decodes: int  # number of decoding chunks
    max_query_len: int  # tokens of the longest chunk, or more
    max_seq_len: int  # the last position of any chunk plus 1, or more
    is_plain: bool = True  # no running request uses more than greedy or random sampling

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token that samples the next."""
        return self.num_decodes == self.num_tokens == len(self.params)


class Rows:
    """One row of every tensor for each running request.

    Invariant: `row_of` maps each request that holds a row to a different row number; all
    others are in `free_rows`. A row's first `num_blocks[row]` table entries are written.
    `filtered`, `penalized` and `biases_of` contain the rows in use that have filters, penalties or
    biases; `special` contains all of these and the rows with logprobs. One more row, number
    `padding_row`, is reserved for padding and never changes: temperature 0, and each block in its
    table is `padding_block`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_blocks: int,
        device: torch.device,
        padding_block: int = 0,
    ) -> None:
        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((max_num_seqs + 1, *shape), dtype=dtype, device=device)

        self.device = device
        self.padding_row = max_num_seqs
        # One column more than a request can have tokens: the padding row writes to position 1,
        # even if max_model_len is 1.
        self.token_ids = column(torch.int32, max_model_len + 1)
        self.block_table = column(torch.int32, max_blocks)
        self.block_table[self.padding_row] = padding_block
        self.temperature = column(torch.float32)
        self.top_k = column(torch.int64)
        self.top_p = column(torch.float64)
        self.min_p = column(torch.float32)
        self.seed = column(torch.int64)
        self.num_prompt_tokens = column(torch.int64)
        self.repetition_penalty = column(torch.float32)
        self.presence_penalty = column(torch.float32)
        self.frequency_penalty = column(torch.float32)
        self.special: set[int] = set()
        self.filtered: set[int] = set()
        self.penalized: set[int] = set()
        self.biases_of: dict[int, list[BiasEntry]] = {}
        self.row_of: dict[str, int] = {}
        self.free_rows = list(reversed(range(max_num_seqs)))
        self.num_blocks = [0] * max_num_seqs

    def __repr__(self) -> str:
        return f"Rows({len(self.row_of)} used, {len(self.free_rows)} free)"

    def update(self, requests: Sequence[Request]) -> list[int]:
        """Bring the rows of a step's requests up to date; return their row numbers.

        New requests get a row with their tokens and settings; all get the blocks they gained. The
        number of copies to the device does not depend on the number of requests. If an error or
        Ctrl-C interrupts it, none of the requests has a row, and the next step writes them again.
        """
        try:
            new = [request for request in requests if request.request_id not in self.row_of]
            for request in new:
                self._take_row(request)
            if new:
                self._write_tokens(new)
                self._write_settings(new)
            rows = [self.row_of[request.request_id] for request in requests]
            self.write_new_blocks(requests, rows)
        except BaseException:
            self._take_back(requests)
            raise
        return rows

    def _take_back(self, requests: Sequence[Request]) -> None:
        """Release the rows of these requests, which may be half-written."""
        for request in requests:
            self.release(request)
        # Not the old list: a row may be missing both there and in `row_of`.
        used = set(self.row_of.values())
        self.free_rows = [row for row in reversed(range(self.padding_row)) if row not in used]

    def _take_row(self, request: Request) -> None:
        """Give the request a free row, and record on the host which settings it uses."""
        params = request.sampling_params
        row = self.free_rows.pop()
        self.row_of[request.request_id] = row
        self.num_blocks[row] = 0
        if has_filters(params):
            self.filtered.add(row)
        if has_penalties(params):
            self.penalized.add(row)
        if entries := bias_entries(request):
            self.biases_of[row] = entries
        is_changed = row in self.filtered or row in self.penalized or row in self.biases_of
        if is_changed or params.logprobs is not None:
            self.special.add(row)

    def _write_tokens(self, requests: Sequence[Request]) -> None:
        """Write the tokens of new requests: one copy, split on the device."""
        lengths = [len(request.token_ids) for request in requests]
        flat = list(chain.from_iterable(request.token_ids for request in requests))
        parts = to_device(flat, torch.int32, self.device).split(lengths)
        for request, tokens in zip(requests, parts, strict=True):
            self.token_ids[self.row_of[request.request_id], : len(tokens)] = tokens

    def _write_settings(self, requests: Sequence[Request]) -> None:
        """Write the settings of new requests: one copy for each column."""
        columns: dict[str, list[float]] = {
            "seed": [request.seed for request in requests],
            "num_prompt_tokens": [request.num_prompt_tokens for request in requests],
        }
        params = [request.sampling_params for request in requests]
        columns |= {name: [getattr(p, name) for p in params] for name in SETTINGS}
        row_ids = [self.row_of[request.request_id] for request in requests]
        rows = to_device(row_ids, torch.int64, self.device)
        for name, values in columns.items():
            column = getattr(self, name)
            column[rows] = to_device(values, column.dtype, self.device)

    def write_new_blocks(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
        """Copy to the device the block ids that the tables of `requests` have gained.

        `rows` are the row numbers of the requests. Tables only grow. The number of operations on
        the device does not depend on the number of new blocks; without new blocks it is 0.

        Example: row 0 has [7] of a table [7, 8], row 2 nothing of [3, 4]: 8, 3 and 4 are written
        to (0, 1), (2, 0) and (2, 1), and `num_blocks` of both is 2.
        """
        gained = [
            (row, index, request.block_table[index])
            for request, row in zip(requests, rows)
            for index in range(self.num_blocks[row], len(request.block_table))
        ]
        if not gained:
            return
        for row, index, _ in gained:
            self.num_blocks[row] = index + 1
        columns = chain.from_iterable(zip(*gained))  # all rows, then all indices, then all blocks
        numbers = to_device(list(columns), torch.int64, self.device)
        row_ids, indices, blocks = numbers.split(len(gained))
        self.block_table[row_ids, indices] = blocks.to(torch.int32)

    def release(self, request: Request) -> None:
        """Take back the request's row, if it has one."""
        row = self.row_of.pop(request.request_id, None)
        if row is not None:
            self.free_rows.append(row)
            self.special.discard(row)
            self.filtered.discard(row)
            self.penalized.discard(row)
            self.biases_of.pop(row, None)

    @property
    def are_plain(self) -> bool:
        """Whether no running request uses filters, biases, penalties or logprobs."""
        return not self.special

    def settings(self, plan: StepPlan) -> SamplingRows:
        """Return the sampling settings of the S rows that sample."""
        row_ids = plan.row_ids[plan.sampling]
        return SamplingRows(
            temperature=self.temperature[row_ids],
            top_k=self.top_k[row_ids],
            top_p=self.top_p[row_ids],
            min_p=self.min_p[row_ids],
            seed=self.seed[row_ids],
            any_random=any(p.temperature > 0 for p in plan.params),
            any_filter=any(row in self.filtered for row in plan.rows),
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
        rows, token_ids, values = zip(*entries)
        return Biases(
            rows=to_device(rows, torch.int64, self.device),
            token_ids=to_device(token_ids, torch.int64, self.device),
            values=to_device(values, torch.float32, self.device),
        )

    def _penalties(self, plan: StepPlan) -> Penalties | None:
        penalized = [index for index, row in enumerate(plan.rows) if row in self.penalized]
        if not penalized:
            return None
        rows = to_device(penalized, torch.int64, self.device)
        row_ids = plan.row_ids[plan.sampling][rows]
        # Read from the device: the token sampled by the step before may not be on the host yet.
        longest = max(plan.ends[index] for index in penalized)
        return Penalties(
            rows=rows,
            token_ids=self.token_ids[:, :longest][row_ids],
            num_prompt_tokens=self.num_prompt_tokens[row_ids],
            repetition=self.repetition_penalty[row_ids],
            presence=self.presence_penalty[row_ids],
            frequency=self.frequency_penalty[row_ids],
        )
