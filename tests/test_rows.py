"""Rows hold what the host wrote once, and give the settings of the rows that sample."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from device_watch import operations_of
from row_makers import make_plan, make_request, write

from minivllm.request import SamplingParams
from minivllm.rows import Rows, bias_entries, has_filters, has_penalties, to_device

CPU = torch.device("cpu")


def rows_for(*requests):
    """Rows in which these requests have a row each, and nothing of their blocks is written."""
    rows = Rows(max_num_seqs=len(requests) + 1, max_model_len=40, max_blocks=10, device=CPU)
    tables = [request.block_table for request in requests]
    for request in requests:
        request.block_table = []
    row_ids = rows.update(requests)
    for request, table in zip(requests, tables):
        request.block_table = table
    return rows, row_ids


@pytest.mark.exercise("rows.Rows.write_new_blocks")
def test_each_request_gets_its_blocks_into_its_own_row():
    """Whatever its place in the step; no other row is touched."""
    first, second = make_request("a", [1], [7, 8]), make_request("b", [1], [3])
    rows, (a, b) = rows_for(first, second)
    rows.write_new_blocks([second, first], [b, a])
    written = rows.block_table[[a, b], :3].tolist()
    assert written == [[7, 8, 0], [3, 0, 0]], (
        "b comes first in the step: does each table go into the request's own row?"
    )
    other = ({0, 1, 2} - {a, b}).pop()
    assert not rows.block_table[other].any(), "a row without a request stays as it is"


@pytest.mark.exercise("rows.Rows.write_new_blocks")
def test_the_host_remembers_what_the_device_has():
    """Also of a request that gained nothing."""
    first, second = make_request("a", [1], [7, 8]), make_request("b", [1], [3])
    rows, (a, b) = rows_for(first, second)
    rows.write_new_blocks([first, second], [a, b])
    second.block_table.append(9)
    rows.write_new_blocks([first, second], [a, b])
    counts = [rows.num_blocks[a], rows.num_blocks[b]]
    assert counts == [2, 2], "does num_blocks say how many entries are on the device now?"


@pytest.mark.exercise("rows.Rows.write_new_blocks")
def test_new_blocks_come_behind_the_old_ones():
    """At the places that they have in the table."""
    request = make_request("a", [1], [7])
    rows, row_ids = rows_for(request)
    rows.write_new_blocks([request], row_ids)
    request.block_table += [8, 9]
    rows.write_new_blocks([request], row_ids)
    assert rows.block_table[row_ids[0], :4].tolist() == [7, 8, 9, 0], (
        "8 is entry 1 of the table, and 9 is entry 2: do they keep their places?"
    )


@pytest.mark.exercise("rows.Rows.write_new_blocks")
def test_only_new_blocks_are_written():
    """A row keeps what it has; new entries come behind it."""
    rows = Rows(max_num_seqs=1, max_model_len=12, max_blocks=3, device=CPU)
    request = make_request("a", [1], [7])
    row = write(rows, request)
    rows.block_table[row, 0] = 70  # would be lost if the row were written again
    request.block_table.append(8)
    assert rows.update([request]) == [row]
    assert rows.block_table[row].tolist() == [70, 8, 0], (
        "entry 0 was on the device already: do you write the whole table again?"
    )


@pytest.mark.exercise("rows.Rows.write_new_blocks")
def test_a_step_without_new_blocks_does_nothing_on_the_device():
    """15 of 16 decode steps of a request are like this."""
    request = make_request("a", [1], [7, 8])
    rows, row_ids = rows_for(request)
    rows.write_new_blocks([request], row_ids)
    count = operations_of(rows.write_new_blocks, [request], row_ids)
    assert count == 0, "nothing was gained: do you send an empty list to the device?"


@pytest.mark.exercise("rows.Rows.write_new_blocks")
def test_all_new_blocks_travel_at_once():
    """As many operations for nine blocks of three requests as for one."""
    one = make_request("a", [1], [7])
    few = operations_of(rows_for(one)[0].write_new_blocks, [one], [0])
    three = [make_request(name, [1], [4, 5, 6]) for name in "bcd"]
    rows, row_ids = rows_for(*three)
    many = operations_of(rows.write_new_blocks, three, row_ids)
    assert many <= few, (
        "nine blocks take more operations than one: does each request, or each block, get a copy"
        " of its own? On a GPU each costs a launch"
    )


@pytest.mark.exercise("rows.Rows.write_new_blocks")
def test_ids_in_any_order_go_to_their_own_places():
    """Tables that descend, of different lengths; one of them has gained nothing."""
    first, second, third = (
        make_request(name, [1], table)
        for name, table in (("a", [9, 4, 6]), ("b", [2]), ("c", [8, 1]))
    )
    rows, (a, b, c) = rows_for(first, second, third)
    rows.write_new_blocks([second], [b])
    rows.write_new_blocks([third, second, first], [c, b, a])
    written = rows.block_table[[a, b, c], :3].tolist()
    assert written == [[9, 4, 6], [2, 0, 0], [8, 1, 0]], (
        "tables [9, 4, 6], [2], [8, 1]: is each id written to its own row and place?"
    )
    assert [rows.num_blocks[row] for row in (a, b, c)] == [3, 1, 2], (
        "3, 1 and 2 entries are on the device: does num_blocks say so for each row?"
    )
    assert first.block_table == [9, 4, 6], "the request's table is only read"


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
        rows.update([first])


def test_a_step_brings_all_its_requests_up_to_date():
    """One that has a row and gains two blocks, two that come with other lengths; each gets its
    own tokens, settings and blocks, in whatever row it is."""
    rows = Rows(max_num_seqs=3, max_model_len=8, max_blocks=3, device=CPU)
    old = make_request("old", [1, 2], [4], temperature=0.5)
    write(rows, old)
    old.block_table += [5, 6]
    long = make_request("long", [7, 8, 9], [0, 1], temperature=0.25, seed=3)
    short = make_request("short", [3], [2], presence_penalty=1.5, seed=8)
    row_ids = rows.update([long, old, short])
    assert len(set(row_ids)) == 3
    assert rows.update([short, long]) == [row_ids[2], row_ids[0]]
    assert rows.token_ids[row_ids, :3].tolist() == [[7, 8, 9], [1, 2, 0], [3, 0, 0]]
    assert rows.block_table[row_ids].tolist() == [[0, 1, 0], [4, 5, 6], [2, 0, 0]]
    assert rows.temperature[row_ids].tolist() == [0.25, 0.5, 1]
    assert rows.seed[row_ids].tolist() == [3, 5, 8]
    assert rows.presence_penalty[row_ids].tolist() == [0, 0, 1.5]
    assert rows.num_prompt_tokens[row_ids[2]] == 1
    assert rows.num_blocks == [3, 2, 1], "old has row 0"


def settings_of(*requests, positions=None):
    """The settings of a step in which these requests sample the token at their position."""
    rows = Rows(max_num_seqs=len(requests), max_model_len=16, max_blocks=2, device=CPU)
    row_ids = [write(rows, request) for request in requests]
    positions = positions or [len(request.token_ids) for request in requests]
    starts = [position - 1 for position in positions]
    params = [request.sampling_params for request in requests]
    plan = make_plan(row_ids, starts, [1] * len(row_ids), range(len(row_ids)), params)
    return rows.settings(plan)


@pytest.mark.parametrize("call", range(4))
def test_an_interrupted_update_leaves_no_row_half_written(call, monkeypatch):
    """Ctrl-C can come between any two copies: the next step writes these rows as if new."""
    old, new = make_request("a", [1, 2], [7]), make_request("b", [5], [3, 4])
    bystander = make_request("c", [9], [2])
    rows = Rows(max_num_seqs=3, max_model_len=40, max_blocks=10, device=CPU)
    rows.update([bystander, old])
    old.block_table.append(8)
    copies, stops = iter(range(100)), [0, 1, 5, 11]  # tokens, row numbers, a setting, blocks

    def interrupted(*arguments):
        if next(copies) == stops[call]:
            raise KeyboardInterrupt
        return to_device(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("minivllm.rows.to_device", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rows.update([old, new])
    assert list(rows.row_of) == ["c"]
    assert sorted([*rows.free_rows, rows.row_of["c"]]) == [0, 1, 2]
    a, b = rows.update([old, new])
    assert rows.token_ids[[a, b], :2].tolist() == [[1, 2], [5, 0]]
    assert rows.block_table[[a, b], :2].tolist() == [[7, 8], [3, 4]]


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
    """After a preemption the answer so far is computed like a prompt, but isn't one."""
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


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, False), ({"top_k": 3}, True), ({"top_p": 0.9}, True), ({"min_p": 0.1}, True)],
)
def test_each_filter_alone_asks(params, expected):
    """Temperature isn't a filter."""
    assert has_filters(SamplingParams(temperature=0.5, **params)) is expected


@pytest.mark.parametrize(
    "params", [{"top_k": 3}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}, {"logprobs": 0}]
)
def test_rows_are_plain_while_no_running_request_asks_for_more(params):
    """Greedy, temperature and seed are plain; a request that leaves takes its wishes along."""
    rows = Rows(max_num_seqs=2, max_model_len=8, max_blocks=2, device=CPU)
    write(rows, make_request("a", [1], [0], temperature=0.5))
    assert rows.are_plain
    asking = make_request("b", [1], [0], **params)
    write(rows, asking)
    assert not rows.are_plain
    rows.release(asking)
    assert rows.are_plain
