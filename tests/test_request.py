"""Sampling settings are checked at the door; a request and its chunks know where they stand."""

import dataclasses
import math
import reprlib

import numpy as np
import pytest

from minivllm.request import (
    Chunk,
    Request,
    RequestMetrics,
    SamplingParams,
    SchedulerOutput,
    require_known_tokens,
)


def make_request(num_prompt_tokens=4, **fields):
    return Request(
        request_id="r",
        token_ids=list(range(num_prompt_tokens)),
        num_prompt_tokens=num_prompt_tokens,
        sampling_params=SamplingParams(),
        max_num_tokens=100,
        **fields,
    )


# -- SamplingParams ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 2**63),
        ("top_k", np.float64(2)),
        ("temperature", 10**400),
        ("temperature", 1e39),
        ("temperature", np.float32("nan")),
        ("temperature", np.bool_(True)),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("max_tokens", 2**31),
        ("max_tokens", np.array([3])),
        ("seed", -1),
        ("seed", 2**63),
        ("ignore_eos", "yes"),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e39),
        ("min_tokens", -1),
        ("min_tokens", 17),  # more than max_tokens
        ("min_tokens", 1.0),
        ("logit_bias", [1, 2]),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("n", 0),
        ("n", 1025),
        ("n", 2.0),
        ("stop", ""),
        ("stop", 3),
        ("stop", b"a"),
        ("stop", {"a"}),
        ("stop", "x" * 1025),
        ("stop", ("a",) * 65),
        ("stop", [str(number) for number in range(1000)]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", {5}),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", None),
    ],
)
def test_impossible_value_is_refused_with_name_and_value(name, value):
    """The message says which setting it was, and what was given."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    shown = value if isinstance(value, int) else reprlib.repr(value)
    assert f"{name}={shown}" in message or f"{name}={float(value)!r}" in message
    assert "must be" in message or "must map" in message
    assert len(message) < 150 or value == 10**400


@pytest.mark.parametrize("token_id", [-1, 1.5, "a", True])
def test_stop_token_ids_are_token_ids(token_id):
    """One bad id among good ones is named."""
    with pytest.raises(ValueError, match=f"stop_token_ids={token_id!r}"):
        SamplingParams(stop_token_ids=(0, token_id))


@pytest.mark.parametrize("text", ["", 1, None, "x" * 1025])
def test_stop_strings_are_texts(text):
    """One bad string among good ones is named."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(stop=["a", text])
    assert f"stop={reprlib.repr(text)}" in str(caught.value)


@pytest.mark.parametrize(
    ("token_id", "value", "named"),
    [
        (-1, 1.0, "logit_bias token id=-1"),
        ("5", 1.0, "logit_bias token id='5'"),
        (True, 1.0, "logit_bias token id=True"),
        (7, 100.5, "logit_bias[7]=100.5"),
        (7, -101, "logit_bias[7]=-101"),
        (7, math.inf, "logit_bias[7]=inf"),
        (7, math.nan, "logit_bias[7]=nan"),
        (7, "much", "logit_bias[7]='much'"),
    ],
)
def test_logit_bias_maps_token_ids_to_numbers(token_id, value, named):
    """One bad entry among good ones is named."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(logit_bias={0: 1.0, token_id: value})
    assert named in str(caught.value)


def test_limits_themselves_are_allowed():
    """Greedy, no filter, one token, the largest seed, every knob at its ends."""
    params = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=1, max_tokens=1, seed=2**63 - 1)
    assert params.temperature == 0
    assert SamplingParams(max_tokens=None, seed=None).max_tokens is None
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3)
    SamplingParams(temperature=1e6, top_k=2**31 - 1, repetition_penalty=1e3, max_tokens=2**31 - 1)
    SamplingParams(max_tokens=3, min_tokens=3, logprobs=0, n=1024)
    SamplingParams(max_tokens=None, min_tokens=10**6, logprobs=20)
    SamplingParams(logit_bias={0: 100, 5: -100.0}, stop=("x" * 1024,) * 64)


def test_min_tokens_and_max_tokens_contradict_each_other_by_name():
    """17 tokens at least and 16 at most: the message has both numbers."""
    with pytest.raises(ValueError, match="min_tokens=17 .*from 0 to 16"):
        SamplingParams(min_tokens=17)


def test_unknown_setting_is_a_type_error():
    """A misspelt setting is not dropped silently."""
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


def test_settings_are_frozen_and_keep_a_tuple():
    """A list is welcome; changing it later changes nothing."""
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(3)
    assert params.stop_token_ids == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5


def test_numbers_of_numpy_are_kept_as_numbers_of_python():
    """Whole ones and others, alone and in lists."""
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(4),
        top_p=np.float64(0.5),
        max_tokens=np.int32(3),
        seed=np.uint8(7),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(3): np.float32(1.5)},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        max_tokens=3,
        seed=7,
        stop_token_ids=(1, 2),
        logit_bias={3: 1.5},
    )
    kept = [
        params.top_k,
        params.max_tokens,
        params.seed,
        *params.stop_token_ids,
        *params.logit_bias,
    ]
    assert {type(value) for value in kept} == {int}
    kept = [params.temperature, params.top_p, params.logit_bias[3]]
    assert {type(value) for value in kept} == {float}


def test_what_vllm_takes_for_off_is_taken():
    """A script may swap the import."""
    assert SamplingParams(stop=None, stop_token_ids=None, top_k=-1) == SamplingParams()


def test_stop_is_kept_as_a_tuple():
    """A single string, a list, or none at all."""
    assert SamplingParams().stop == ()
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")


def test_logit_bias_is_kept_as_a_copy():
    """Changing the mapping later changes nothing; settings with one can still be in a set."""
    bias = {3: 1.5}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.5}
    assert len({params, SamplingParams(logit_bias={3: 1.5})}) == 1
    assert params != SamplingParams(logit_bias={3: 1.25})


def test_settings_can_be_changed_by_replacing():
    """And are checked again."""
    params = SamplingParams(stop="a", logit_bias={3: 1.5}, min_tokens=2)
    assert dataclasses.replace(params, seed=7) == SamplingParams(
        stop="a", logit_bias={3: 1.5}, min_tokens=2, seed=7
    )
    with pytest.raises(ValueError, match="min_tokens=2"):
        dataclasses.replace(params, max_tokens=1)


@pytest.mark.parametrize("params", [{"logit_bias": {5: 1.0}}, {"stop_token_ids": [2, 5]}])
def test_token_ids_must_be_of_the_model(params):
    """A vocabulary of 5 has ids 0 to 4, one of 6 has 5 too."""
    require_known_tokens(SamplingParams(**params), 6)
    with pytest.raises(ValueError, match="token id=5 .*from 0 to 4"):
        require_known_tokens(SamplingParams(**params), 5)


# -- Request -----------------------------------------------------------------------------------


def test_tokens_in_flight_count():
    """A token that was sampled and not read back yet is a token."""
    request = make_request(4)
    request.token_ids.append(9)
    request.num_pending_tokens = 1
    assert request.num_tokens == 6
    assert request.output_token_ids == [9]


def test_decoding_begins_when_the_prefill_is_scheduled():
    """Before admission, with nothing to prefill yet, a request does not decode."""
    request = make_request(4)
    assert not request.is_decoding
    request.num_prefill_tokens = 4
    request.num_computed_tokens = 3
    assert not request.is_decoding
    request.num_computed_tokens = 4
    assert request.is_decoding


def test_request_is_finished_once_it_has_a_reason():
    """The reason is the state: there is no second flag to forget."""
    request = make_request()
    assert not request.is_finished
    request.finish_reason = "length"
    assert request.is_finished


def test_requests_share_no_state_and_are_compared_by_identity():
    """Two requests with the same prompt are two requests."""
    one, two = make_request(), make_request()
    one.block_table.append(3)
    one.metrics.token_times.append(1.0)
    assert two.block_table == []
    assert two.metrics.token_times == []
    assert one != two
    assert len({one, two}) == 2


# -- a step ------------------------------------------------------------------------------------


def test_chunk_ends_behind_its_last_token():
    """Half-open: positions 16 to 19 are start 16, end 20."""
    chunk = Chunk(make_request(), start=16, length=4, samples=False, is_decode=False)
    assert chunk.end == 20


def test_step_counts_its_tokens():
    """A decode of 1 and a prompt's chunk of 7 are 8 tokens; an empty step has none."""
    request = make_request()
    chunks = [Chunk(request, 9, 1, True, True), Chunk(request, 0, 7, False, False)]
    assert SchedulerOutput(chunks).num_tokens == 8
    assert SchedulerOutput().num_tokens == 0


# -- RequestMetrics ----------------------------------------------------------------------------


def test_times_are_measured_from_arrival():
    """Arrived at 10 s, scheduled at 11, tokens at 12, 12.5 and 14.5."""
    metrics = RequestMetrics(10.0, 11.0, 14.5, [12.0, 12.5, 14.5])
    assert metrics.queue_time == 1.0
    assert metrics.time_to_first_token == 2.0
    assert metrics.inter_token_latencies == [0.5, 2.0]


def test_times_that_did_not_happen_are_none():
    """A request that never ran has no first token, instead of one at 0 s."""
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.queue_time is None
    assert metrics.time_to_first_token is None
    assert metrics.inter_token_latencies == []
