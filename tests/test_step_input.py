"""A step's input is gathered from the rows, and its tokens scattered back into them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from device_watch import question_of
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


@pytest.mark.exercise("step_input.token_positions")
def test_positions_count_from_each_chunks_start():
    """Lengths 1 and 3, starting at positions 9 and 4."""
    owners = torch.tensor([0, 1, 1, 1])
    found = token_positions(torch.tensor([9, 4]), torch.tensor([1, 3]), owners).tolist()
    assert found[0] == 9, "the first token of the step is position 9 of its text"
    assert found[1:] == [4, 5, 6], (
        "the second chunk is positions 4, 5, 6 of its own text: does its count begin at its own"
        " first token, and not at the step's?"
    )


@pytest.mark.exercise("step_input.token_positions")
def test_positions_of_three_chunks():
    """A prompt, a decode, and a prompt that goes on: each in its own text."""
    starts, lengths = torch.tensor([0, 7, 2]), torch.tensor([2, 1, 2])
    owners = torch.tensor([0, 0, 1, 2, 2])
    found = token_positions(starts, lengths, owners)
    assert found.tolist() == [0, 1, 7, 2, 3], (
        "the third chunk begins at 2: whose tokens come before it in the step?"
    )
    assert found.dtype == torch.int64, "positions are int64, like starts: is a float among them?"


@pytest.mark.exercise("step_input.token_positions")
def test_positions_are_computed_where_the_tensors_are():
    """A question to the device would wait for all that runs there."""
    starts, lengths = torch.tensor([9, 4]), torch.tensor([1, 3])
    question = question_of(token_positions, starts, lengths, torch.tensor([0, 1, 1, 1]))
    assert question is None, (
        "do you read a number of a tensor (int, tolist, a loop over it), or make a tensor elsewhere"
        " (device=owners.device)?"
    )


@pytest.mark.exercise("step_input.token_positions")
def test_token_positions_only_read_the_plan():
    """The same tensors serve every step of a graph."""
    starts, lengths, owners = torch.tensor([9, 4]), torch.tensor([1, 3]), torch.tensor([0, 1, 1, 1])
    token_positions(starts, lengths, owners)
    assert starts.tolist() == [9, 4] and lengths.tolist() == [1, 3], (
        "starts and lengths are the plan's: do you add to them in place?"
    )
    assert owners.tolist() == [0, 1, 1, 1], "owners are only read"


def test_owners_and_query_starts_of_two_chunks():
    """Lengths 1 and 3."""
    lengths = torch.tensor([1, 3])
    assert token_owners(lengths, 4).tolist() == [0, 1, 1, 1]
    assert query_starts(lengths).tolist() == [0, 1, 4]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6))
def test_owners_and_positions_equal_a_plain_loop(chunks):
    """For any starts and lengths."""
    starts, lengths = (torch.tensor(values) for values in zip(*chunks))
    owners = token_owners(lengths, int(lengths.sum()))
    assert owners.tolist() == [i for i, (_, n) in enumerate(chunks) for _ in range(n)]
    expected = [start + j for start, n in chunks for j in range(n)]
    assert token_positions(starts, lengths, owners).tolist() == expected


def two_rows():
    """Two requests in rows 2 and 1 of four, and a step of both, block size 4: a decode at position
    5 and a chunk of positions 2 to 5 that does not sample."""
    rows = Rows(max_num_seqs=3, max_model_len=12, max_blocks=3, device=CPU)
    write(rows, make_request("leaves", [99] * 5, [1, 3]))
    second = write(rows, make_request("b", [20, 21, 22, 23, 24, 25, 26], [5, 9]))
    first = write(rows, make_request("a", [10, 11, 12, 13, 14, 15], [7, 2]))
    return rows, make_plan([first, second], [5, 2], [1, 4], [0])


@pytest.mark.exercise("step_input.gather")
def test_tokens_come_out_of_the_requests_rows():
    """Chunk 0 belongs to row 2, chunk 1 to row 1."""
    inputs = gather(*two_rows(), 4, slot_mapping)
    assert inputs.positions.tolist() == [5, 2, 3, 4, 5]
    assert inputs.input_ids.tolist() == [15, 22, 23, 24, 25], (
        "chunk 0 belongs to row 2, and chunk 1 to row 1: do you look the tokens up by chunk, or by"
        " row?"
    )


@pytest.mark.exercise("step_input.gather")
def test_slots_come_out_of_the_requests_block_tables():
    """Positions 5 of [7, 2] and 2 to 5 of [5, 9]."""
    inputs = gather(*two_rows(), 4, slot_mapping)
    assert inputs.metadata.block_table.tolist() == [[7, 2, 0], [5, 9, 0]], (
        "one table for each chunk, in the order of the step"
    )
    assert inputs.slot_mapping.tolist() == [9, 22, 23, 36, 37], (
        "owners count chunks: which block tables do you give to slot_mapping?"
    )


@pytest.mark.exercise("step_input.gather")
def test_the_keys_of_a_chunk_end_with_it():
    """The decode's own token counts; the rest of a prompt does not."""
    lens = gather(*two_rows(), 4, slot_mapping).metadata.seq_lens
    assert lens[0] == 6, "the token at position 5 sees itself: do its keys end with the chunk?"
    assert lens[1] == 6, "the row holds 7 tokens, but only 6 are computed after this chunk"
    assert lens.dtype == torch.int32, "lengths are int32, as the kernels read them"


@pytest.mark.exercise("step_input.gather")
def test_numbers_of_the_host_are_passed_on():
    """The device is not asked for a maximum."""
    rows, plan = two_rows()
    plan.num_decodes, plan.max_query_len, plan.max_seq_len = 1, 40, 60
    inputs = gather(rows, plan, 4, slot_mapping)
    metadata = inputs.metadata
    known = (metadata.num_decodes, metadata.max_query_len, metadata.max_seq_len)
    assert known == (1, 40, 60), "these three are in the plan"
    assert metadata.query_starts.tolist() == [0, 1, 5]
    assert inputs.last.tolist() == [0]


@pytest.mark.exercise("step_input.gather")
def test_a_step_is_gathered_without_a_question_to_the_device():
    """It would wait for all that runs there."""
    rows, plan = two_rows()
    question = question_of(gather, rows, plan, 4, slot_mapping)
    assert question is None, (
        "do you read a number of a tensor (int, tolist, a loop), or make a tensor elsewhere?"
    )


@pytest.mark.exercise("step_input.gather")
def test_gathering_changes_neither_rows_nor_plan():
    """Both are read again, by the next step and by a graph."""
    rows, plan = two_rows()
    before = rows.token_ids.clone(), rows.block_table.clone()
    gather(rows, plan, 4, slot_mapping)
    assert plan.starts.tolist() == [5, 2] and plan.lengths.tolist() == [1, 4], (
        "the plan is only read: do you add lengths to starts in place?"
    )
    assert torch.equal(rows.token_ids, before[0]) and torch.equal(rows.block_table, before[1]), (
        "the rows are only read"
    )


@pytest.mark.exercise("step_input.scatter")
def test_a_sampled_token_goes_behind_the_last_one():
    """And nowhere else."""
    rows = Rows(max_num_seqs=2, max_model_len=8, max_blocks=2, device=CPU)
    first = write(rows, make_request("a", [10, 11], [0]))
    second = write(rows, make_request("b", [20, 21, 22], [1]))
    before = rows.token_ids.clone()
    scatter(rows, make_plan([second, first], [1, 0], [2, 2], [0]), torch.tensor([99]))
    assert rows.token_ids[second].tolist()[:4] == [20, 21, 22, 99], (
        "the chunk is positions 1 and 2, so the new token is position 3 of its row"
    )
    assert torch.equal(rows.token_ids[first], before[first]), (
        "the other chunk samples nothing: is its row left alone?"
    )


@pytest.mark.exercise("step_input.scatter")
def test_each_sampled_token_finds_its_row():
    """Three chunks, of which the first one samples nothing."""
    rows = Rows(max_num_seqs=3, max_model_len=8, max_blocks=2, device=CPU)
    row_ids = [write(rows, make_request(name, [1, 2, 3], [0])) for name in "abc"]
    plan = make_plan(row_ids[::-1], [0, 2, 2], [2, 1, 1], [1, 2])
    scatter(rows, plan, torch.tensor([98, 99]))
    found = rows.token_ids[row_ids, :4].tolist()
    assert found == [[1, 2, 3, 99], [1, 2, 3, 98], [1, 2, 3, 0]], (
        "plan.sampling counts chunks of the step: which row does chunk 1 belong to?"
    )


@pytest.mark.exercise("step_input.scatter")
def test_only_the_plans_tensors_say_where():
    """Its lists are the host's: a replayed step has other ones."""
    rows, plan = two_rows()
    plan.rows, plan.ends = [0], [1]
    scatter(rows, plan, torch.tensor([98]))
    row = plan.row_ids[0]
    assert rows.token_ids[row, 6] == 98, (
        "a replayed step (chapter 08) has new numbers in the plan's tensors and old ones in its"
        " lists: do you use plan.rows or plan.ends?"
    )


@pytest.mark.exercise("step_input.scatter")
def test_tokens_are_scattered_without_a_question_to_the_device():
    """The host does not know them yet."""
    rows, plan = two_rows()
    question = question_of(scatter, rows, plan, torch.tensor([99]))
    assert question is None, (
        "the sampled tokens are on the device alone: do you read one, or a row, on the host?"
    )


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
    """It reads and writes only the padding row and the padding block."""
    rows = Rows(max_num_seqs=2, max_model_len=1, max_blocks=1, device=CPU, padding_block=9)
    plan = padding_plan([1, 1], rows.padding_row, 1, CPU)
    inputs = gather(rows, plan, 4, slot_mapping)
    assert plan.is_decode
    assert inputs.slot_mapping.tolist() == [36, 36], "block 9"
    scatter(rows, plan, torch.tensor([5, 6]))
    assert not rows.token_ids[:2].any()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda t: t + 1, None),
        (lambda t: t.repeat_interleave(2), None),
        (lambda t: torch.repeat_interleave(t, t, output_size=3), None),
        (lambda t: torch.repeat_interleave(t, t), "repeat_interleave without output_size"),
        (lambda t: torch.arange(2), "arange without device="),
        (lambda t: torch.arange(t[0], device=t.device), "arange up to a tensor"),
        (lambda t: [int(x) for x in (t[0], t[1])], "__int__"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: t[t > 1], "x[mask]"),
    ],
)
def test_the_watch_sees_questions_and_nothing_else(function, expected):
    """Of the checks' own stand-in for a GPU."""
    assert question_of(function, torch.tensor([1, 2])) == expected
