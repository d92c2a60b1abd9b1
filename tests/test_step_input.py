"""A step's input is gathered from the rows, and its tokens scattered back into them."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from hypothesis import given
from hypothesis import strategies as st
from row_makers import make_plan, make_request, write

from minivllm.ops import slot_mapping
from minivllm.rows import Rows
from minivllm.step_input import (
    gather,
    padding_plan,
    query_starts,
    scatter,
    token_owners,
    token_positions,
)

CPU = torch.device("cpu")


def test_owners_and_positions_of_two_chunks():
    """Lengths 1 and 3, starting at positions 9 and 4."""
    lengths = torch.tensor([1, 3])
    owners = token_owners(lengths, 4)
    assert owners.tolist() == [0, 1, 1, 1]
    assert token_positions(torch.tensor([9, 4]), lengths, owners).tolist() == [9, 4, 5, 6]
    assert query_starts(lengths).tolist() == [0, 1, 4]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6))
def test_owners_and_positions_equal_a_plain_loop(chunks):
    """For any starts and lengths."""
    starts, lengths = (torch.tensor(values) for values in zip(*chunks))
    owners = token_owners(lengths, int(lengths.sum()))
    assert owners.tolist() == [i for i, (_, n) in enumerate(chunks) for _ in range(n)]
    expected = [start + j for start, n in chunks for j in range(n)]
    assert token_positions(starts, lengths, owners).tolist() == expected


def test_gather_reads_tokens_slots_and_lengths_out_of_the_rows():
    """Block size 4: a decode at position 5 and a chunk of positions 2 to 5."""
    rows = Rows(max_num_seqs=3, max_model_len=12, max_blocks=3, device=CPU)
    first = write(rows, make_request("a", [10, 11, 12, 13, 14, 15], [7, 2]))
    second = write(rows, make_request("b", [20, 21, 22, 23, 24, 25, 26], [5, 9]))
    plan = make_plan([first, second], [5, 2], [1, 4], [0])
    inputs = gather(rows, plan, 4, slot_mapping)
    assert inputs.input_ids.tolist() == [15, 22, 23, 24, 25]
    assert inputs.positions.tolist() == [5, 2, 3, 4, 5]
    assert inputs.slot_mapping.tolist() == [9, 22, 23, 36, 37]
    assert inputs.metadata.seq_lens.tolist() == [6, 6], (
        "keys end with the chunk, not with the prompt"
    )
    assert inputs.last.tolist() == [0]


def test_scatter_writes_behind_the_last_token_of_each_sampling_chunk():
    """And nowhere else."""
    rows = Rows(max_num_seqs=2, max_model_len=8, max_blocks=2, device=CPU)
    first = write(rows, make_request("a", [10, 11], [0]))
    second = write(rows, make_request("b", [20, 21, 22], [1]))
    before = rows.token_ids.clone()
    scatter(rows, make_plan([first, second], [0, 1], [2, 2], [1]), torch.tensor([99]))
    assert rows.token_ids[second].tolist()[:4] == [20, 21, 22, 99]
    assert torch.equal(rows.token_ids[first], before[first])


def test_a_decode_step_is_gathered_like_chunks_of_one_token():
    """The short way for decodes and the way for all chunks give the same numbers."""
    rows = Rows(max_num_seqs=3, max_model_len=12, max_blocks=3, device=CPU)
    row_ids = [
        write(rows, make_request("a", [10, 11, 12, 13, 14], [7, 2])),
        write(rows, make_request("b", [20, 21, 22], [5])),
    ]
    plans = [make_plan(row_ids, [4, 2], [1, 1], [0, 1], [None, None]) for _ in range(2)]
    plans[0].num_decodes = 2
    assert plans[0].is_decode and not plans[1].is_decode
    decode, chunks = (gather(rows, plan, 4, slot_mapping) for plan in plans)
    for name in ("input_ids", "positions", "slot_mapping", "last"):
        assert getattr(decode, name).tolist() == getattr(chunks, name).tolist()
    for name in ("block_table", "query_starts", "seq_lens"):
        given, expected = (getattr(i.metadata, name) for i in (decode, chunks))
        assert given.tolist() == expected.tolist() and given.dtype == expected.dtype


def test_padding_touches_no_row_of_a_request():
    """It reads and writes the padding row alone, and the block that is nobody's."""
    rows = Rows(max_num_seqs=2, max_model_len=1, max_blocks=1, device=CPU, padding_block=9)
    plan = padding_plan([1, 1], rows.padding_row, 1, CPU)
    inputs = gather(rows, plan, 4, slot_mapping)
    assert plan.is_decode
    assert inputs.slot_mapping.tolist() == [36, 36], "block 9"
    scatter(rows, plan, torch.tensor([5, 6]))
    assert not rows.token_ids[:2].any()
