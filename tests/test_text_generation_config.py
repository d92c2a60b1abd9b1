"""A checkpoint's own sampling settings: what is there is read, what is impossible is named."""

import json
import math

import pytest

from minivllm.request import SamplingParams
from minivllm.text.generation_config import generation_defaults


def read(folder, **fields):
    """The defaults of a directory whose generation_config.json has `fields`."""
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return generation_defaults(folder)


def test_no_file_and_no_fields_mean_no_defaults(tmp_path):
    """Then the engine's own hold."""
    assert generation_defaults(tmp_path) == {}
    assert read(tmp_path) == {}


def test_each_setting_is_read(tmp_path):
    """Under the names of SamplingParams; other fields are left alone."""
    fields = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    others = {"eos_token_id": [1, 2], "max_length": 20, "transformers_version": "4.51.0"}
    assert read(tmp_path, **fields, **others) == {k: fields[k] for k in fields if k != "do_sample"}


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_each_setting_may_be_the_only_one(tmp_path, name):
    """No other is made up; null is as good as absent."""
    assert read(tmp_path, **{name: 1}) == {name: 1}
    assert read(tmp_path, **{name: None}) == {}


def test_without_sampling_the_temperature_is_0(tmp_path):
    """Greedy: the settings of sampling have no say, a penalty still has."""
    assert read(tmp_path, do_sample=False) == {"temperature": 0.0}
    assert read(tmp_path, do_sample=False, temperature=0.6, top_k=5, repetition_penalty=1.5) == {
        "temperature": 0.0,
        "repetition_penalty": 1.5,
    }
    assert read(tmp_path, do_sample=None, temperature=0.6) == {"temperature": 0.6}


def test_both_ways_to_say_all_tokens(tmp_path):
    """-1 and 0 are one setting."""
    assert read(tmp_path, top_k=-1) == read(tmp_path, top_k=0) == {"top_k": 0}


def test_the_limits_of_each_range_are_allowed(tmp_path):
    """Temperature 0 is greedy, top_p 1 and min_p 0 are off."""
    limits = {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0}
    assert read(tmp_path, **limits) == limits
    assert read(tmp_path, min_p=1) == {"min_p": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.7"),
        ("temperature", math.nan),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("do_sample", "no"),
    ],
)
def test_impossible_value_is_refused_with_file_and_field(tmp_path, name, value):
    """The message leads to the line to repair."""
    with pytest.raises(ValueError) as caught:
        read(tmp_path, **{name: value})
    assert str(tmp_path / "generation_config.json") in str(caught.value)
    assert f"{name}={value!r}" in str(caught.value)


def test_impossible_value_is_refused_even_where_it_has_no_say(tmp_path):
    """A broken file is not half believed."""
    with pytest.raises(ValueError, match="top_p=7"):
        read(tmp_path, do_sample=False, top_p=7)


def test_a_file_that_is_no_json_is_named(tmp_path):
    """Half a download, say."""
    (tmp_path / "generation_config.json").write_text('{"temperature":')
    with pytest.raises(ValueError, match="generation_config.json is not valid JSON"):
        generation_defaults(tmp_path)


def test_the_defaults_are_settings_of_ours(tmp_path):
    """SamplingParams takes them as they are."""
    fields = {"temperature": 0.6, "top_k": -1, "top_p": 0.95, "min_p": 0.1}
    params = SamplingParams(**read(tmp_path, **fields, repetition_penalty=1.1))
    assert (params.top_k, params.repetition_penalty) == (0, 1.1)
