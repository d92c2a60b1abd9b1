"""A checkpoint's config.json is read for every architecture; what we cannot compute is named."""

import pytest

from minivllm.model_config import SUPPORTED_ARCHITECTURES, ModelConfig

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


def test_architecture_may_be_a_single_string():
    """Some tools write one name where the field has a list."""
    assert read(architectures="Qwen3ForCausalLM").architecture == "Qwen3ForCausalLM"
    with pytest.raises(ValueError, match="architecture GPT2LMHeadModel is not"):
        read(architectures="GPT2LMHeadModel")


@pytest.mark.parametrize("name", ["Qwen2_5_VLForConditionalGeneration", "LlamaForCausalLM"])
def test_language_model_inside_a_larger_one_is_refused(name):
    """What lies under text_config belongs to a model with images or sound."""
    with pytest.raises(ValueError, match=f"{name} has .* under text_config.*Qwen3ForCausalLM"):
        read(architectures=[name], text_config={"vocab_size": 100})


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "64"])
@pytest.mark.parametrize("name", ["vocab_size", "num_attention_heads", "head_dim"])
def test_impossible_size_is_refused_with_name_and_value(name, value):
    """A size is a whole number of at least 1."""
    with pytest.raises(ValueError, match=f"config.json's {name}={value!r} must be a whole number"):
        read(**{name: value})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "max_position_embeddings"])
def test_absurd_size_is_refused_before_memory_is_allocated(name):
    """The message has the limit."""
    with pytest.raises(ValueError, match=f"{name}=1000000000000 .* from 1 to 16777216"):
        read(**{name: 10**12})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("attention_bias", "false", "attention_bias='false' must be True or False"),
        ("mlp_bias", 1, "mlp_bias=1 must be True or False"),
        ("tie_word_embeddings", "no", "tie_word_embeddings='no' must be True or False"),
        ("use_sliding_window", [], r"use_sliding_window=\[\] must be True or False"),
        ("rope_theta", 0, "rope_theta=0 must be a finite number above 0"),
        ("rope_theta", "1e6", "rope_theta='1e6' must be a finite number"),
        ("rope_scaling", {"type": ["x"]}, r"rope_type=\['x'\] must be a non-empty string"),
        ("rope_scaling", 0, "rope_scaling=0 in config.json is not a JSON object"),
        ("original_max_position_embeddings", "4k", "original_max_position_embeddings='4k' must"),
        ("layer_types", "full_attention", "layer_types='full_attention' in config.json is not"),
        ("layer_types", [{}], "layers of the kind {}"),
        ("architectures", 5, "architecture 5 is not supported"),
        ("hidden_act", ["silu"], r"hidden_act=\['silu'\] is not supported"),
        ("torch_dtype", 16, "dtype '16'"),
        ("partial_rotary_factor", "half", "partial_rotary_factor=half is not supported"),
    ],
)
def test_odd_type_is_named_with_its_field(name, value, words):
    """A config.json written by hand, or by another program."""
    with pytest.raises(ValueError, match=words):
        read(**{name: value})


def test_heads_must_divide():
    """Query heads share key heads evenly, and the hidden size splits into heads."""
    with pytest.raises(ValueError, match="heads=4 must be divisible by num_key_value_heads=3"):
        read(num_key_value_heads=3)
    with pytest.raises(
        ValueError, match="hidden_size=66 must be divisible by num_attention_heads=4"
    ):
        read(hidden_size=66)
    assert read(hidden_size=66, head_dim=16).head_dim == 16
    assert read(hidden_size=64, head_dim=None).head_dim == 16


def test_head_of_odd_size_is_refused():
    """RoPE turns pairs; a head of 15 would leave one value over."""
    with pytest.raises(ValueError, match="head_dim=15 is odd"):
        read(head_dim=15)


@pytest.mark.parametrize("value", [-1.0, "1e-5", float("nan")])
def test_impossible_epsilon_is_refused(value):
    """It is a number; where config.json is silent, it is 1e-6."""
    with pytest.raises(ValueError, match="rms_norm_eps="):
        read(rms_norm_eps=value)
    assert read(rms_norm_eps=None).rms_norm_eps == 1e-6


def test_unsupported_activation_is_refused():
    """Another function would give another model; SiLU has two names."""
    with pytest.raises(ValueError, match="hidden_act='gelu'.*only silu"):
        read(hidden_act="gelu")
    assert read(hidden_act="swish") == read(hidden_act="silu") == read(hidden_act=None)


@pytest.mark.parametrize(
    ("field", "value", "method"),
    [
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "awq"),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ("quantization_config", {"load_in_4bit": True}, "unknown"),
        ("quantization_config", "int4", "int4"),
        ("compression_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ],
)
def test_quantized_checkpoint_is_refused_by_its_method(field, value, method):
    """Values without their scales would be read as weights."""
    with pytest.raises(ValueError, match=rf"\({method}\) are not supported; take the unquantized"):
        read(**{field: value})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int8"])
def test_unsupported_dtype_is_refused(dtype):
    """The message has the dtype, and the three that are computed in."""
    with pytest.raises(ValueError, match=f"'{dtype}'.*float32, bfloat16, float16"):
        read(torch_dtype=dtype)
    assert read(torch_dtype="torch.bfloat16").dtype == "bfloat16"


# -- sliding windows ---------------------------------------------------------------------------


def test_sliding_window_caps_the_length():
    """Up to its window a sliding-window model is exact, so it is served up to there."""
    assert read(sliding_window=512).max_position == 512
    assert read(sliding_window=4096).max_position == 2048
    assert read(sliding_window=None).max_position == 2048
    assert read(sliding_window=512, use_sliding_window=False).max_position == 2048


@pytest.mark.parametrize(
    ("architecture", "fields", "length"),
    [
        # Qwen uses its window only where config.json says so.
        ("Qwen2ForCausalLM", {"sliding_window": 512}, 8192),
        ("Qwen3ForCausalLM", {"sliding_window": 512, "use_sliding_window": True}, 512),
        # Mistral always does; 4096 where the field is left out, none where it is null.
        ("MistralForCausalLM", {"sliding_window": 512}, 512),
        ("MistralForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, 8192),
    ],
)
def test_silent_config_means_what_transformers_assumes(architecture, fields, length):
    """Each architecture has its own default for the window."""
    config = read(architectures=[architecture], max_position_embeddings=8192, **fields)
    assert config.max_position == length


def test_layer_types_decide_where_they_are_given():
    """One layer with a window caps the length; none does not, whatever else is said."""
    both = ["full_attention", "sliding_attention"]
    qwen = {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 512}
    assert read(**qwen, layer_types=both).max_position == 512
    full = {"layer_types": ["full_attention"] * 2, "use_sliding_window": True}
    assert read(**qwen, **full).max_position == 2048


def test_unsupported_kind_of_layer_is_refused_by_name():
    """Attention of another kind, or a window without a size."""
    with pytest.raises(ValueError, match="kind chunked_attention, linear_attention .layer_types"):
        read(layer_types=["linear_attention", "full_attention", "chunked_attention"])
    with pytest.raises(ValueError, match="sliding_attention, but sliding_window is missing"):
        read(layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match="sliding_window=0 must be"):
        read(sliding_window=0)


# -- RopeConfig --------------------------------------------------------------------------------


def test_rope_without_scaling():
    """The base frequency is what the checkpoint says, else 10,000."""
    assert (read().rope.kind, read().rope.theta) == ("default", 10000.0)
    assert read(rope_theta=5e5).rope.theta == 5e5


def test_rope_forms_of_old_and_new_checkpoints_agree():
    """`rope_scaling` next to `rope_theta`, or everything in `rope_parameters`."""
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
    """Said inside the scaling, or next to it, or else the model's own length."""
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    name = "original_max_position_embeddings"
    assert read(rope_scaling={**llama3, name: 512}).rope.original_max_position == 512
    assert read(rope_scaling=llama3, **{name: 256}).rope.original_max_position == 256
    assert read(rope_scaling=llama3).rope.original_max_position == 2048


def test_incomplete_rope_scaling_names_what_it_lacks():
    """No factor is made up for a checkpoint that forgot to say it."""
    with pytest.raises(ValueError, match="'linear' lacks factor"):
        read(rope_scaling={"rope_type": "linear"})
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}
    with pytest.raises(ValueError, match="low_freq_factor=4 must be below its high_freq_factor=4"):
        read(rope_scaling=llama3)
    with pytest.raises(ValueError, match="'llama3' lacks low_freq_factor, high_freq_factor"):
        read(rope_scaling={"rope_type": "llama3", "factor": 8.0})


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "mrope"])
def test_unsupported_rope_is_refused_by_name(kind):
    """A scaling that we would compute wrongly does not load, in the old and the new form."""
    for field in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=f"'{kind}'.*default, linear, llama3"):
            read(**{field: {"rope_type": kind, "factor": 4.0}})


def test_rope_of_a_part_of_each_head_is_refused():
    """Also where transformers 5 writes it."""
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
        read(partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
        read(rope_parameters={"partial_rotary_factor": 0.5})


def test_rope_for_each_kind_of_layer_is_refused():
    """Read as one set of parameters it would be the default, in silence."""
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match="for each kind of layer .full_attention, sliding_att"):
        read(rope_parameters=kinds)


def test_impossible_rope_values_are_named():
    """Numbers above 0, in a JSON object."""
    with pytest.raises(ValueError, match="rope_theta=-1"):
        read(rope_theta=-1)
    with pytest.raises(ValueError, match="RoPE's factor='8'"):
        read(rope_scaling={"type": "linear", "factor": "8"})
    with pytest.raises(ValueError, match="rope_scaling='linear' in config.json is not a JSON obj"):
        read(rope_scaling="linear")
