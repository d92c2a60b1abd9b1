"""Device rows: what the device knows of every running request, and which rows a step is about.

Each running request owns a row of every tensor in `Rows`: its tokens, its block table, its
sampling settings. The host writes only what changed. Leaves out reading a step's input out of
them (`step_input`) and running it (`model_runner`). Notebook 06.

Tensor letters: T tokens, N chunks of a step, S of them that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.request import Request, SamplingParams
from minivllm.sampling_settings import (
    BiasEntry,
    Biases,
    Penalties,
    SamplingRows,
    bias_entries,
    has_filters,
    has_penalties,
)

# -- device rows ------------------------------------------------------------------------------


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor on `device`, without waiting for the work that runs there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # Only pinned memory is copied behind the host's back. PyTorch gives it to nobody else before
    # the copy has been done.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


@dataclass
class StepPlan:
    """What a step computes, N chunks with T tokens in all; chunks that decode come first."""

    # On the device:
    row_ids: Tensor  # [N] int64
    starts: Tensor  # [N] int64, position of each chunk's first token
    lengths: Tensor  # [N] int64, tokens
    sampling: Tensor  # [S] int64, which of the N chunks sample
    # On the host:
    params: list[SamplingParams]  # of the S chunks that sample
    rows: list[int]  # their row numbers
    ends: list[int]  # the position of the token that each samples
    num_tokens: int  # T
    num_decodes: int  # chunks that decode
    max_query_len: int  # tokens of the longest chunk; may be more
    max_seq_len: int  # the last position of any chunk, plus 1; may be more

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token that samples the next."""
        return self.num_decodes == self.num_tokens == len(self.params)


class Rows:
    """One row of every tensor per running request.

    Invariant: `row_of` maps each request that holds a row to a different row number; all
    others are in `free_rows`. A row's first `num_blocks[row]` table entries are written.
    `filtered`, `penalized` and `biases_of` hold rows in use, those that ask for it; `special`
    holds all of these and those that want logprobs. One more row, number `padding_row`, belongs
    to no request and stays as it is: temperature 0, and each block in its table is
    `padding_block`.
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

        self.device, self.padding_row = device, max_num_seqs
        # One place more than a request may have tokens: the padding row writes to position 1,
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

    def write(self, request: Request) -> int:
        """Give the request a row, copy its tokens and settings there; returns the row number."""
        row = self.free_rows.pop()
        self.row_of[request.request_id] = row
        self.num_blocks[row] = 0
        tokens = to_device(request.token_ids, torch.int32, self.device)
        self.token_ids[row, : len(tokens)] = tokens
        params = request.sampling_params
        self._set(row, seed=request.seed, temperature=params.temperature)
        if has_filters(params):
            self.filtered.add(row)
        self._set(row, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        if has_penalties(params):
            self.penalized.add(row)
            self._set(
                row,
                num_prompt_tokens=request.num_prompt_tokens,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
            )
        if entries := bias_entries(request):
            self.biases_of[row] = entries
        is_asking = row in self.filtered or row in self.penalized or row in self.biases_of
        if is_asking or params.logprobs is not None:
            self.special.add(row)
        return row

    def _set(self, row: int, **values: float) -> None:
        """Write one row of some columns."""
        for name, value in values.items():
            # Not `column[row] = value`: that copies from ordinary memory, and waits for it.
            getattr(self, name)[row].fill_(value)

    def write_new_blocks(self, request: Request, row: int) -> None:
        """Copy what the block table has gained since the last step."""
        start, end = self.num_blocks[row], len(request.block_table)
        if end > start:
            new = to_device(request.block_table[start:], torch.int32, self.device)
            self.block_table[row, start:end] = new
            self.num_blocks[row] = end

    def release(self, request: Request) -> None:
        """Take the row back. A request without one is fine."""
        row = self.row_of.pop(request.request_id, None)
        if row is not None:
            self.free_rows.append(row)
            self.special.discard(row)
            self.filtered.discard(row)
            self.penalized.discard(row)
            self.biases_of.pop(row, None)

    @property
    def are_plain(self) -> bool:
        """Whether no running request asks for filters, biases, penalties or logprobs."""
        return not self.special

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
        asking = [index for index, row in enumerate(plan.rows) if row in self.penalized]
        if not asking:
            return None
        rows = to_device(asking, torch.int64, self.device)
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
