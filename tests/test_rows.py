"""Rows hold what the host wrote once; a step's input is gathered from them, results scattered."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.ops import slot_mapping
from minivllm.request import Request, SamplingParams
from minivllm.rows import (
    Rows,
    StepPlan,
    gather,
    query_starts,
    scatter,
    token_owners,
    token_positions,
)

CPU = torch.device("cpu")


def make_request(request_id, token_ids, block_table, **params):
    """A request with these tokens and blocks."""
    return Request(
        request_id=request_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(**params),
        max_num_tokens=100,
        seed=params.get("seed", 5),
        block_table=list(block_table),
    )


def make_plan(row_ids, starts, lengths, sampling):
    """A plan of chunks, none of them said to decode."""
    return StepPlan(
        row_ids=torch.tensor(row_ids),
        starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        sampling=torch.tensor(sampling, dtype=torch.int64),
        params=[],
        num_tokens=sum(lengths),
        num_decodes=0,
    )


def write(rows, request):
    """Give the request a row with its tokens and blocks."""
    row = rows.write(request)
    rows.write_new_blocks(request, row)
    return row


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
    assert inputs.seq_lens.tolist() == [6, 6], "keys end with the chunk, not with the prompt"
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


def test_only_new_blocks_are_written():
    """A row keeps what it has; new entries come behind it."""
    rows = Rows(max_num_seqs=1, max_model_len=12, max_blocks=3, device=CPU)
    request = make_request("a", [1], [7])
    row = write(rows, request)
    rows.block_table[row, 0] = 70  # would be lost if the row were written again
    request.block_table.append(8)
    rows.write_new_blocks(request, row)
    assert rows.block_table[row].tolist() == [70, 8, 0]


def test_a_row_is_given_back_and_written_anew():
    """The next request finds nothing of the one before."""
    rows = Rows(max_num_seqs=1, max_model_len=8, max_blocks=2, device=CPU)
    first = make_request("a", [1, 2, 3], [4, 5])
    row = write(rows, first)
    rows.release(first)
    rows.release(first)
    assert rows.free_rows == [row]
    second = make_request("b", [9], [6])
    assert write(rows, second) == row
    assert rows.token_ids[row, 0] == 9
    assert rows.block_table[row, 0] == 6
    with pytest.raises(IndexError):
        rows.write(first)


def test_settings_are_gathered_per_row():
    """Each sampling request brings its own; the flags say what the batch contains."""
    rows = Rows(max_num_seqs=2, max_model_len=8, max_blocks=2, device=CPU)
    plain = make_request("a", [1], [0], temperature=0)
    fancy = make_request("b", [1], [0], temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, seed=9)
    ids = torch.tensor([write(rows, plain), write(rows, fancy)])
    settings = rows.settings(ids, [plain.sampling_params, fancy.sampling_params])
    assert settings.temperature.tolist() == [0, 0.5]
    assert settings.top_k.tolist() == [0, 4]
    assert settings.top_p.tolist() == [1, 0.75]
    assert settings.min_p.tolist() == [0, 0.25]
    assert settings.seed.tolist() == [5, 9]
    assert (settings.any_random, settings.any_filter) == (True, True)
    settings = rows.settings(ids[:1], [plain.sampling_params])
    assert (settings.any_random, settings.any_filter) == (False, False)


def test_a_seed_of_63_bits_is_kept_exactly():
    """A float in between would round it."""
    rows = Rows(max_num_seqs=1, max_model_len=8, max_blocks=2, device=CPU)
    row = write(rows, make_request("a", [1], [0], seed=2**63 - 2))
    assert rows.seed[row].item() == 2**63 - 2
