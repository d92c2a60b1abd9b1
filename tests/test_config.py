"""The settings are checked at the door; a checkpoint's config is read for every architecture."""

import dataclasses
import math

import pytest

from minivllm.config import (
    SUPPORTED_ARCHITECTURES,
    EngineConfig,
    ModelConfig,
    replace,
    require_bool,
    require_choice,
    require_int,
    require_number,
    require_text,
)

# The smallest complete config.json; each test changes what it is about.
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
}


def read(**changes):
    return ModelConfig.from_dict({**RAW, **changes})


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


def test_block_size_says_what_to_take():
    """A refused block size comes with one that works."""
    with pytest.raises(ValueError, match="block_size=24 is no power of two; try 16"):
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
    """Name, value and limit stand in every message."""
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
    """NaN and infinity are no settings, and True is not 1."""
    with pytest.raises(ValueError, match="x="):
        require_number("x", value, -1e9)


# -- ModelConfig -------------------------------------------------------------------------------


def test_config_json_is_read():
    """Each field arrives under our name."""
    config = read(
        head_dim=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (100, 64, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.intermediate_size, config.max_position) == (128, 2048)
    assert (config.rms_norm_eps, config.dtype) == (1e-5, "bfloat16")
    assert config.tie_word_embeddings is True


def test_what_config_json_may_leave_out():
    """Heads without groups, the usual head size, no ties, no end tokens, float32."""
    config = read(num_key_value_heads=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.tie_word_embeddings is False
    assert config.dtype == "float32"


def test_newer_name_of_the_dtype():
    """transformers 5 writes `dtype` where 4 wrote `torch_dtype`."""
    assert read(dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("architecture", "attention_bias", "qkv_bias", "o_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", False, False, False, False),
        ("LlamaForCausalLM", True, True, True, False),
        ("MistralForCausalLM", False, False, False, False),
        ("Qwen2ForCausalLM", False, True, False, False),
        ("Qwen3ForCausalLM", False, False, False, True),
        ("Qwen3ForCausalLM", True, True, True, True),
    ],
)
def test_architectures_differ_in_bias_and_norm(
    architecture, attention_bias, qkv_bias, o_bias, qk_norm
):
    """What sets the supported decoders apart is all in the config."""
    config = read(architectures=[architecture], attention_bias=attention_bias)
    assert config.architecture == architecture
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (qkv_bias, o_bias, qk_norm)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], None, []])
def test_unsupported_architecture_is_refused_by_name(architectures):
    """The message names it and lists what would work."""
    with pytest.raises(ValueError) as caught:
        read(architectures=architectures)
    assert (architectures or ["(none)"])[0] in str(caught.value)
    assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize("name", sorted(set(RAW) - {"architectures", "num_key_value_heads"}))
def test_missing_field_is_named(name):
    """An incomplete config.json is refused with the field that it lacks."""
    with pytest.raises(ValueError, match=f"no '{name}'"):
        read(**{name: None})


def test_unsupported_activation_and_quantization_are_refused():
    """What would compute something else does not load."""
    with pytest.raises(ValueError, match="'gelu'"):
        read(hidden_act="gelu")
    with pytest.raises(ValueError, match=r"\(awq\)"):
        read(quantization_config={"quant_method": "awq"})


def test_sliding_window_caps_the_length():
    """Up to its window a sliding-window model is exact, so it is served up to there."""
    assert read(sliding_window=512).max_position == 512
    assert read(sliding_window=4096).max_position == 2048
    assert read(sliding_window=None).max_position == 2048
    assert read(sliding_window=512, use_sliding_window=False).max_position == 2048


# -- RopeConfig --------------------------------------------------------------------------------


def test_rope_without_scaling():
    """The base frequency is what the checkpoint says, else 10,000."""
    assert (read().rope.kind, read().rope.theta) == ("default", 10000.0)
    assert read(rope_theta=5e5).rope.theta == 5e5


def test_rope_forms_of_old_and_new_checkpoints_agree():
    """`rope_scaling` beside `rope_theta`, or everything in `rope_parameters`."""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    old = read(rope_theta=5e5, rope_scaling=llama3).rope
    assert old == read(rope_parameters={"rope_theta": 5e5, **llama3}).rope
    assert (old.kind, old.theta, old.factor) == ("llama3", 5e5, 8.0)
    assert (old.high_freq_factor, old.original_max_position) == (4.0, 4096)


def test_rope_linear_in_its_oldest_form():
    """The oldest checkpoints call the kind `type`."""
    rope = read(rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)


def test_rope_knows_how_long_the_model_was_before():
    """Said inside the scaling, or beside it, or else the model's own length."""
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    name = "original_max_position_embeddings"
    assert read(rope_scaling={**llama3, name: 512}).rope.original_max_position == 512
    assert read(rope_scaling=llama3, **{name: 256}).rope.original_max_position == 256
    assert read(rope_scaling=llama3).rope.original_max_position == 2048


def test_incomplete_rope_scaling_names_what_it_lacks():
    """No factor is made up for a checkpoint that forgot to say it."""
    with pytest.raises(ValueError, match="'linear' lacks factor"):
        read(rope_scaling={"rope_type": "linear"})
    with pytest.raises(ValueError, match="'llama3' lacks low_freq_factor, high_freq_factor"):
        read(rope_scaling={"rope_type": "llama3", "factor": 8.0})


def test_unsupported_rope_is_refused_by_name():
    """A scaling that we would compute wrongly does not load."""
    with pytest.raises(ValueError, match="'yarn'.*default, linear, llama3"):
        read(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
        read(partial_rotary_factor=0.5)
