"""One step's input, gathered from the device rows, and its tokens, scattered back into them.

All of it happens on the device, so a token id never has to visit the host before the next step.
Leaves out the rows themselves (`rows`) and running the step (`model_runner`). Notebook 06.

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

# Fills `gather`'s gap: block tables [N, max_blocks], owners [T], positions [T], block size ->
# slots [T]. The module `ops` has it in plain torch, `kernels` in Triton (Notebook 07).
SlotMapping = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def padding_plan(
    lengths: list[int], padding_row: int, max_seq_len: int, device: torch.device
) -> StepPlan:
    """A step of chunks that are nobody's, from position 0 of the padding row on; those of one
    token decode, and come first. For warming up, and for graphs to write real rows over.

    What the host says of it holds for any step of these lengths: random sampling, and keys up to
    `max_seq_len`.
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
    """What the model and its attention read in one step; T tokens of N requests."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64, from 0
    slot_mapping: Tensor  # [T] int64, where each token's key and value go
    last: Tensor  # [S] int64, the tokens after which one is sampled
    metadata: AttentionMetadata  # whose queries and keys are where


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
    # 1. Whose token each one is, and where in the text it stands.
    if plan.is_decode:
        owners, positions, last = plan.sampling, plan.starts, plan.sampling
        starts = torch.arange(len(owners) + 1, dtype=torch.int32, device=rows.device)
    else:
        owners = token_owners(plan.lengths, plan.num_tokens)
        positions = token_positions(plan.starts, plan.lengths, owners)
        starts = query_starts(plan.lengths)
        last = (starts[1:] - 1)[plan.sampling].long()
    # 2. What the rows hold of it.
    block_table = rows.block_table[plan.row_ids]
    metadata = AttentionMetadata(
        block_table=block_table,
        query_starts=starts,
        seq_lens=(plan.starts + plan.lengths).to(torch.int32),
        num_decodes=plan.num_decodes,
        max_query_len=plan.max_query_len,
        max_seq_len=plan.max_seq_len,
    )
    return StepInput(
        input_ids=rows.token_ids[plan.row_ids[owners], positions],
        positions=positions,
        slot_mapping=slot_mapping(block_table, owners, positions, block_size),
        last=last,
        metadata=metadata,
    )


def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    """Write the sampled tokens `[S]` into the rows, each behind its request's last token."""
    row_ids = plan.row_ids[plan.sampling]
    ends = (plan.starts + plan.lengths)[plan.sampling]
    rows.token_ids[row_ids, ends] = token_ids.to(torch.int32)
