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
    """Where each of a step's T tokens stands in the text of its own request, int64 `[T]`.

    `starts` and `lengths`, int64 `[N]`, are the position of each chunk's first token and its
    number of tokens; `owners`, int64 `[T]`, is the chunk of each token (`token_owners`). All on
    one device, where all of it is computed: no number is read on the host.

    Example: starts [9, 4] with lengths [1, 3], so owners [0, 1, 1, 1], give [9, 4, 5, 6].
    """
    # A token's place in the step, less its chunk's first place, counts up from 0 in each chunk.
    first_places = lengths.cumsum(0) - lengths
    places = torch.arange(len(owners), device=owners.device)
    return places - first_places[owners] + starts[owners]


def query_starts(lengths: Tensor) -> Tensor:
    """Where each chunk's tokens begin in the step, and the end: lengths 1, 3 give 0 1 4."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def token_places(plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whose each token is and where: `owners` and `positions` `[T]`, `query_starts` `[N + 1]`
    int32, and the places `[S]` of the tokens after which one is sampled; the others int64."""
    if plan.is_decode:  # the same numbers, without computing them
        starts = torch.arange(len(plan.row_ids) + 1, dtype=torch.int32, device=plan.starts.device)
        return plan.sampling, plan.starts, starts, plan.sampling
    owners = token_owners(plan.lengths, plan.num_tokens)
    starts = query_starts(plan.lengths)
    last = (starts[1:] - 1)[plan.sampling].long()
    return owners, token_positions(plan.starts, plan.lengths, owners), starts, last


def gather(rows: Rows, plan: StepPlan, block_size: int, slot_mapping: SlotMapping) -> StepInput:
    """A step's input, read out of the rows on the device alone.

    nano-vllm's `prepare_prefill` and `prepare_decode` in one: a decoding request is a
    chunk of one token. Chunk n belongs to row `plan.row_ids[n]`, and its block table is entry n
    of the metadata's `block_table`. A chunk's keys end with it: `seq_lens[n]`, int32, counts the
    positions up to its last token, whatever else its row holds. `slot_mapping` is `ops`'.

    Example, block size 4: row 6 holds the tokens [10, 11, 12, 13] and the blocks [7, 2]; its
    chunk starts at 2 and has 2 tokens. input_ids [12, 13], positions [2, 3], slots [30, 31],
    seq_lens [4].
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
    # Owners count the chunks of this step; the rows have numbers of their own.
    input_ids = rows.token_ids[plan.row_ids[owners], positions]
    slots = slot_mapping(block_table, owners, positions, block_size)
    return StepInput(input_ids, positions, slots, last, metadata)


def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    """Write the sampled tokens `[S]` into the rows, each behind its request's last token.

    `plan.sampling`, int64 `[S]`, says which of the N chunks sample. `rows.token_ids` is int32.
    Nothing is read on the host, and of the plan only the tensors are used: a graph replays this
    with other numbers in them.

    Example: chunks in rows [6, 1] start at [2, 9] and have [3, 1] tokens; the second one samples
    42: it goes to row 1, position 10.
    """
    row_ids = plan.row_ids[plan.sampling]
    ends = (plan.starts + plan.lengths)[plan.sampling]
    rows.token_ids[row_ids, ends] = token_ids.to(torch.int32)
