"""Gather one step's input from the device rows, and scatter its tokens back into them.

Everything happens on the device: the next step does not wait until the host has read a token id.
Does not write the rows (see `rows`) or run the step (see `model_runner`). Notebook 06.

Tensor letters: T tokens, N chunks of a step, S of them that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.ops import AttentionMetadata
from minivllm.request import SamplingParams
from minivllm.rows import Rows, StepPlan, to_device

# Block tables [N, max_blocks], owners [T], positions [T], block size -> slots [T]. `ops` has it in
# plain torch, `kernels` in Triton (Notebook 07).
SlotMapping = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def padding_plan(
    lengths: list[int], padding_row: int, max_seq_len: int, device: torch.device
) -> StepPlan:
    """Return a plan of padding chunks, which all start at position 0 of the padding row.

    Chunks of one token decode, and must come first. Used for warming up, and by graphs, which
    write real rows over it: the values on the host are therefore those of any step of these
    lengths, with random sampling and up to `max_seq_len` keys.
    """

    def column(values: Sequence[int]) -> Tensor:
        return to_device(values, torch.int64, device)

    num_rows = len(lengths)
    return StepPlan(
        row_ids=column([padding_row] * num_rows),
        starts=column([0] * num_rows),
        lengths=column(lengths),
        sampling=column(range(num_rows)),
        params=[SamplingParams()] * num_rows,
        rows=[padding_row] * num_rows,
        ends=lengths,
        num_tokens=sum(lengths),
        num_decodes=lengths.count(1),
        max_query_len=max(lengths),
        max_seq_len=max_seq_len,
    )


@dataclass
class StepInput:
    """What the model and its attention read in one step: T tokens of N requests."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64, from 0
    slot_mapping: Tensor  # [T] int64, the slot for each token's key and value
    last: Tensor  # [S] int64, index (0 to T - 1) of the last token of each chunk that samples
    metadata: AttentionMetadata  # which queries and keys belong to which request


def token_owners(lengths: Tensor, num_tokens: int) -> Tensor:
    """Return the chunk that each token belongs to: `[N] -> [T]`; lengths 1, 3 give 0 1 1 1."""
    chunks = torch.arange(len(lengths), device=lengths.device)
    # With a known total the host does not wait for the device to sum the lengths.
    return torch.repeat_interleave(chunks, lengths, output_size=num_tokens)


def token_positions(starts: Tensor, lengths: Tensor, owners: Tensor) -> Tensor:
    """Return the position of each of a step's T tokens in its own request, int64 `[T]`.

    `starts` and `lengths`, int64 `[N]`: position of each chunk's first token, and number of tokens.
    `owners`, int64 `[T]`: the chunk of each token. The result is computed on their device; the host
    reads nothing. Example: starts [9, 4], lengths [1, 3], owners [0, 1, 1, 1] -> [9, 4, 5, 6].
    """
    # The index of a token in the step minus that of its chunk's first token counts from 0.
    first_places = lengths.cumsum(0) - lengths
    places = torch.arange(len(owners), device=owners.device)
    return places - first_places[owners] + starts[owners]


def query_starts(lengths: Tensor) -> Tensor:
    """Return where each chunk's tokens begin in the step, and the end: lengths 1, 3 give 0 1 4."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def token_places(plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a step's owners `[T]`, positions `[T]`, query starts `[N + 1]` and `last` `[S]`.

    Query starts are int32, the others int64; see `token_owners`, `token_positions`, `query_starts`
    and `StepInput.last`.
    """
    if plan.is_decode:  # the same numbers, without computing them
        starts = torch.arange(len(plan.row_ids) + 1, dtype=torch.int32, device=plan.starts.device)
        return plan.sampling, plan.starts, starts, plan.sampling
    owners = token_owners(plan.lengths, plan.num_tokens)
    starts = query_starts(plan.lengths)
    last = (starts[1:] - 1)[plan.sampling].long()
    return owners, token_positions(plan.starts, plan.lengths, owners), starts, last


def gather(rows: Rows, plan: StepPlan, block_size: int, slot_mapping: SlotMapping) -> StepInput:
    """Return a step's input, read from the rows on the device alone.

    Entry n of `metadata.block_table` and of `metadata.seq_lens` (int32) belongs to chunk n. Its
    keys are those up to the chunk's last token, even if the row contains more tokens.

    Example, block size 4: row 6 has tokens [10, 11, 12, 13] and blocks [7, 2]; its chunk starts at
    2 and has 2 tokens. Then input_ids [12, 13], positions [2, 3], slots [30, 31], seq_lens [4].
    """
    owners, positions, starts, last = token_places(plan)
    block_table = rows.block_table[plan.row_ids]
    metadata = AttentionMetadata(
        block_table=block_table,
        query_starts=starts,
        seq_lens=(plan.starts + plan.lengths).to(torch.int32),
        num_decodes=plan.num_decodes,
        max_query_len=plan.max_query_len,
        max_seq_len=plan.max_seq_len,
    )
    # Owners are chunks of this step, not rows.
    input_ids = rows.token_ids[plan.row_ids[owners], positions]
    slots = slot_mapping(block_table, owners, positions, block_size)
    return StepInput(input_ids, positions, slots, last, metadata)


def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    """Write the sampled tokens, int64 `[S]`, into the rows, each behind its request's last token.

    The host reads nothing, and only the tensors of the plan are used: a graph replays this with
    other numbers in them. Example: chunks in rows [6, 1] start at [2, 9] and have [3, 1] tokens.
    The second samples 42, which goes to row 1, position 10.
    """
    row_ids = plan.row_ids[plan.sampling]
    ends = (plan.starts + plan.lengths)[plan.sampling]
    rows.token_ids[row_ids, ends] = token_ids.to(torch.int32)
