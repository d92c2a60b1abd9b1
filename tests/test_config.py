"""The settings are checked at the door."""

import dataclasses
import math
from pathlib import Path

import pytest

from minivllm.config import (
    EngineConfig,
    model_name,
    replace,
    require_bool,
    require_choice,
    require_int,
    require_number,
    require_text,
)

# -- EngineConfig ------------------------------------------------------------------------------


def test_defaults_are_valid():
    """An engine needs no setting at all."""
    config = EngineConfig()
    assert config.model == "smollm2-135m"
    assert config.block_size == 16
    assert config.num_kv_blocks is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", None),
        ("model_path", ""),
        ("dtype", "float8"),
        ("device", ""),
        ("device", "mps"),
        ("device", "cuda:x"),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 2.0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", -1),
        ("num_kv_blocks", 0),
        ("block_size", 0),
        ("block_size", 24),
        ("block_size", 512),
        ("memory_utilization", 0),
        ("memory_utilization", 1.5),
        ("memory_utilization", math.nan),
        ("watermark", -0.1),
        ("watermark", 0.6),
        ("enable_prefix_caching", 1),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_impossible_setting_is_refused_with_name_and_value(name, value):
    """The message says which setting it was, and what was given."""
    with pytest.raises(ValueError) as caught:
        EngineConfig(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 1),
        ("block_size", 256),
        ("memory_utilization", 1),
        ("watermark", 0),
        ("watermark", 0.5),
        ("seed", 2**63 - 1),
        ("max_num_seqs", 1),
    ],
)
def test_limits_themselves_are_allowed(name, value):
    """The ends of each range belong to it."""
    assert getattr(EngineConfig(**{name: value}), name) == value


def test_a_path_is_an_absolute_directory(monkeypatch, tmp_path):
    """A `Path` never means a built-in name or the Hub; "~" is the home directory."""
    monkeypatch.chdir(tmp_path)
    assert model_name(Path("owner/name")) == str(tmp_path / "owner" / "name")
    assert model_name(Path("~/x")) == str(Path.home() / "x")
    with pytest.raises(ValueError, match="model=5"):
        EngineConfig(model=5)


def test_block_size_says_what_to_take():
    """A refused block size comes with one that works."""
    with pytest.raises(ValueError, match="block_size=24 must be a power of two; try 16"):
        EngineConfig(block_size=24)


def test_step_has_room_for_every_running_request():
    """The token budget is at least the number of requests, and the message has both numbers."""
    with pytest.raises(ValueError, match=r"=64 .*=128.* Lower max_num_seqs to 64"):
        EngineConfig(max_num_batched_tokens=64, max_num_seqs=128)
    EngineConfig(max_num_batched_tokens=64, max_num_seqs=64)


def test_unknown_setting_is_a_type_error():
    """A misspelt setting is not dropped silently."""
    with pytest.raises(TypeError, match="max_num_seq'"):
        EngineConfig(max_num_seq=4)


def test_settings_are_frozen():
    """What an engine was built with cannot change under it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1


def test_replace_checks_again():
    """A changed copy passes the same door."""
    config = EngineConfig(max_num_seqs=4)
    assert replace(config, seed=7) == EngineConfig(max_num_seqs=4, seed=7)
    assert config.seed == 0
    with pytest.raises(ValueError, match="seed=-7"):
        replace(config, seed=-7)


# -- the checks --------------------------------------------------------------------------------


def test_checks_say_what_is_allowed():
    """Name, value and limit are in every message."""
    with pytest.raises(ValueError, match="n=0 must be a whole number of at least 1$"):
        require_int("n", 0, 1)
    with pytest.raises(ValueError, match="n=9 must be a whole number from 1 to 8$"):
        require_int("n", 9, 1, 8)
    with pytest.raises(ValueError, match="x=0 must be a finite number above 0 and at most 1$"):
        require_number("x", 0, 0, 1, open_low=True)
    with pytest.raises(ValueError, match="x=-1 must be a finite number of at least 0$"):
        require_number("x", -1, 0)
    with pytest.raises(ValueError, match="b=0 must be True or False$"):
        require_bool("b", 0)
    with pytest.raises(ValueError, match="t=3 must be a non-empty string$"):
        require_text("t", 3)
    with pytest.raises(ValueError, match="c='x' must be one of a, b$"):
        require_choice("c", "x", ("a", "b"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", None])
def test_number_is_finite_and_no_bool(value):
    """NaN, infinity and True are refused."""
    with pytest.raises(ValueError, match="x="):
        require_number("x", value, -1e9)
