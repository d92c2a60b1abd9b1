"""Rows hold what the host wrote once; a step's input is gathered from them, results scattered."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.ops import slot_mapping
from minivllm.request import Request, SamplingParams
from minivllm.rows import Rows, StepPlan
from minivllm.sampling_settings import bias_entries, has_penalties
from minivllm.step_input import gather, query_starts, scatter, token_owners, token_positions

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


def make_plan(row_ids, starts, lengths, sampling, params=()):
    """A plan of chunks, none of them said to decode."""
    return StepPlan(
        row_ids=torch.tensor(row_ids),
        starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        sampling=torch.tensor(sampling, dtype=torch.int64),
        params=list(params),
        rows=[row_ids[i] for i in sampling],
        ends=[starts[i] + lengths[i] for i in sampling],
        num_tokens=sum(lengths),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(s + n for s, n in zip(starts, lengths)),
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


def settings_of(*requests, positions=None):
    """The settings of a step in which these requests sample the token at their position."""
    rows = Rows(max_num_seqs=len(requests), max_model_len=16, max_blocks=2, device=CPU)
    row_ids = [write(rows, request) for request in requests]
    positions = positions or [len(request.token_ids) for request in requests]
    starts = [position - 1 for position in positions]
    params = [request.sampling_params for request in requests]
    plan = make_plan(row_ids, starts, [1] * len(row_ids), range(len(row_ids)), params)
    return rows.settings(plan)


def test_settings_are_gathered_per_row():
    """Each sampling request brings its own; the flags say what the batch contains."""
    plain = make_request("a", [1], [0], temperature=0)
    fancy = make_request("b", [1], [0], temperature=0.5, top_k=4, top_p=0.7, min_p=0.25, seed=9)
    settings = settings_of(plain, fancy)
    assert settings.temperature.tolist() == [0, 0.5]
    assert settings.top_k.tolist() == [0, 4]
    assert settings.top_p.tolist() == [1, 0.7], "not the nearest float32"
    assert settings.min_p.tolist() == [0, 0.25]
    assert settings.seed.tolist() == [5, 9]
    assert (settings.any_random, settings.any_filter) == (True, True)
    settings = settings_of(plain)
    assert (settings.any_random, settings.any_filter) == (False, False)


def test_a_step_in_which_no_row_asks_has_no_penalties_and_biases():
    """So it pays for none."""
    asking = make_request("a", [1], [0], presence_penalty=1.0, logit_bias={3: 1.0})
    plain = make_request("b", [1], [0], top_k=4)
    settings = settings_of(plain)
    assert settings.penalties is None and settings.biases is None
    settings = settings_of(plain, asking)
    assert settings.penalties is not None and settings.biases is not None
    part = settings[torch.tensor([0])]
    assert part.penalties is None and part.biases is None, "they are for the whole step"


def test_penalties_come_with_the_tokens_on_the_device():
    """Of the rows that ask, in the order of the step; the longest text decides the width."""
    first = make_request("a", [1, 2, 3], [0], repetition_penalty=1.5)
    plain = make_request("b", [4, 5, 6, 7, 8], [0])
    last = make_request("c", [7, 8], [0], presence_penalty=-1, frequency_penalty=0.5)
    penalties = settings_of(first, plain, last, positions=[3, 5, 4]).penalties
    assert penalties.rows.tolist() == [0, 2]
    assert penalties.token_ids.tolist() == [[1, 2, 3, 0], [7, 8, 0, 0]]
    assert penalties.num_prompt_tokens.tolist() == [3, 2]
    assert penalties.repetition.tolist() == [1.5, 1]
    assert penalties.presence.tolist() == [0, -1]
    assert penalties.frequency.tolist() == [0, 0.5]


def test_penalties_and_biases_are_those_of_the_chunks_that_sample():
    """A chunk in the middle of a prompt comes before them, and asks for the same."""
    rows = Rows(max_num_seqs=2, max_model_len=8, max_blocks=2, device=CPU)
    params = {"presence_penalty": 1.0, "logit_bias": {3: 1.0}}
    requests = [make_request("a", [1], [0], **params), make_request("b", [8, 9], [0], **params)]
    row_ids = [write(rows, request) for request in requests]
    plan = make_plan(row_ids, [0, 0], [1, 2], [1], [requests[1].sampling_params])
    settings = rows.settings(plan)
    assert settings.penalties.rows.tolist() == [0]
    assert settings.penalties.token_ids.tolist() == [[8, 9]]
    assert settings.biases.rows.tolist() == [0]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 2}, True),
        ({"logit_bias": {1: 1.0}, "top_k": 3}, False),
    ],
)
def test_each_penalty_alone_asks(params, expected):
    """Above or below its value for off."""
    assert has_penalties(SamplingParams(**params)) is expected


def test_min_tokens_is_a_bias_of_minus_infinity_while_the_answer_is_short():
    """Prompt of 4 and min_tokens 3: positions 4, 5 and 6 have it, for each stop token."""
    request = make_request("a", [1, 1, 1, 1], [0], min_tokens=3, logit_bias={7: 1.5})
    request.stop_token_ids = frozenset([9, 2])
    inf = float("inf")
    assert bias_entries(request) == [(7, 1.5, inf), (2, -inf, 7), (9, -inf, 7)]
    biases = settings_of(request, positions=[6]).biases
    assert (biases.rows.tolist(), biases.token_ids.tolist()) == ([0, 0, 0], [7, 2, 9])
    assert biases.values.tolist() == [1.5, -inf, -inf]
    assert settings_of(request, positions=[7]).biases.token_ids.tolist() == [7]


def test_the_prompt_length_counts_and_not_what_a_resumed_request_has():
    """After a preemption the answer so far is computed like a prompt, and is no prompt."""
    request = make_request("a", [1, 1, 1, 1, 6, 7], [0], min_tokens=3, presence_penalty=1)
    request.num_prompt_tokens, request.stop_token_ids = 4, frozenset([2])
    settings = settings_of(request)
    assert settings.biases.token_ids.tolist() == [2]
    assert settings.penalties.num_prompt_tokens.tolist() == [4]
    assert settings_of(request, positions=[7]).biases is None


def test_biases_name_the_row_of_the_step():
    """Two of three rows have one; a request whose min_tokens are there asks for none."""
    requests = [
        make_request("a", [1], [0]),
        make_request("b", [1], [0], logit_bias={3: -2.0}),
        make_request("c", [1, 1], [0], logit_bias={4: 1.0, 5: 2.0}),
    ]
    biases = settings_of(*requests).biases
    assert biases.rows.tolist() == [1, 2, 2]
    assert biases.token_ids.tolist() == [3, 4, 5]
    assert biases.values.tolist() == [-2, 1, 2]
    assert biases.values.dtype == torch.float32
    done = make_request("d", [1, 1, 1], [0], min_tokens=1)
    done.stop_token_ids = frozenset([2])
    assert settings_of(done, positions=[4]).biases is None


def test_a_reused_row_has_nothing_of_the_penalties_and_biases_before():
    """The next request in it asks for nothing."""
    rows = Rows(max_num_seqs=1, max_model_len=8, max_blocks=2, device=CPU)
    first = make_request("a", [1], [0], presence_penalty=1.0, logit_bias={3: 1.0})
    write(rows, first)
    rows.release(first)
    second = make_request("b", [1], [0])
    row = write(rows, second)
    settings = rows.settings(make_plan([row], [0], [1], [0], [second.sampling_params]))
    assert settings.penalties is None and settings.biases is None


def test_a_seed_of_63_bits_is_kept_exactly():
    """A float in between would round it."""
    rows = Rows(max_num_seqs=1, max_model_len=8, max_blocks=2, device=CPU)
    row = write(rows, make_request("a", [1], [0], seed=2**63 - 2))
    assert rows.seed[row].item() == 2**63 - 2
