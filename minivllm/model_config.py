"""A checkpoint's `config.json`, in one set of names for every architecture.

A model that would be computed wrongly is refused. Does not handle files (see
`checkpoint.weights`) or the settings of the engine (see `config`). Not built in the course.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.config import DTYPES, require_bool, require_int, require_number, require_text

# The largest size that is accepted, larger than in any model, so that a damaged config.json is
# refused before memory is allocated for it.
MAX_SIZE = 2**24


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder as `config.json` describes it."""

    architecture: str
    vocab_size: int  # tokens
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int  # tokens
    tie_word_embeddings: bool
    qkv_bias: bool  # bias on the query, key and value projections (Qwen2)
    o_bias: bool  # bias on the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head (Qwen3)
    dtype: str  # as the checkpoint declares it

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a `config.json`.

        Raises ValueError, naming the field and its value, for a model that would be computed
        wrongly (architecture, RoPE scaling, activation, quantization, kind of layer) and for a
        field that is missing, of the wrong type or impossible.
        """
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        heads = _whole(raw, "num_attention_heads")
        # The other two ignore this setting: Qwen2 always has its biases, Mistral never.
        may_choose = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        attention_bias = may_choose and _flag(raw, "attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=_whole(raw, "vocab_size"),
            hidden_size=_whole(raw, "hidden_size"),
            num_layers=_whole(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_num_kv_heads(raw, heads),
            head_dim=_head_dim(raw, heads),
            intermediate_size=_whole(raw, "intermediate_size"),
            rms_norm_eps=_norm_eps(raw),
            rope=RopeConfig.from_dict(raw),
            max_position=_max_position(raw, architecture),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and _flag(raw, "mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=_declared_dtype(raw),
        )


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its base and how it is stretched for long contexts."""

    theta: float = 10000.0
    kind: str = "default"  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # tokens

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_theta` and `rope_scaling`, or the one dict `rope_parameters` that
        transformers 5 writes. Raises ValueError for a scaling that is not supported."""
        rope = _rope_fields(raw, "rope_scaling") | _rope_fields(raw, "rope_parameters")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        require_text("RoPE's rope_type", kind)
        _check_rope(rope, kind)
        old_length = "original_max_position_embeddings"
        lengths = (rope.get(old_length), raw.get(old_length), raw.get("max_position_embeddings"))
        return cls(
            theta=_rope_theta(rope, raw),
            kind=kind,
            factor=rope.get("factor", 1.0),
            low_freq_factor=rope.get("low_freq_factor", 1.0),
            high_freq_factor=rope.get("high_freq_factor", 4.0),
            original_max_position=_whole({old_length: _first(*lengths)}, old_length, 8192),
        )


_REQUIRED_BY_ROPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _check_rope(rope: Mapping[str, Any], kind: str) -> None:
    if kind not in _REQUIRED_BY_ROPE:
        raise ValueError(
            f"RoPE scaling {kind!r} is not supported; supported are default, linear, llama3"
        )
    missing = [name for name in _REQUIRED_BY_ROPE[kind] if rope.get(name) is None]
    if missing:
        raise ValueError(f"RoPE scaling {kind!r} lacks {', '.join(missing)} in config.json")
    for name in _REQUIRED_BY_ROPE[kind]:
        require_number(f"RoPE's {name}", rope[name], 0, open_low=True)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(
            f"RoPE's low_freq_factor={rope['low_freq_factor']} must be below its"
            f" high_freq_factor={rope['high_freq_factor']}"
        )


def _rope_theta(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> float:
    partial = _first(rope.get("partial_rotary_factor"), raw.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial} is not supported; only 1.0 is")
    theta = _first(rope.get("rope_theta"), raw.get("rope_theta"), 10000.0)
    require_number("rope_theta", theta, 0, open_low=True)
    return float(theta)


def _rope_fields(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields = _first(raw.get(name), {})
    if not isinstance(fields, Mapping):
        raise ValueError(f"{name}={fields!r} in config.json is not a JSON object")
    # Gemma and its like write {"full_attention": {...}, "sliding_attention": {...}}.
    kinds = [key for key, value in fields.items() if isinstance(value, Mapping)]
    if kinds:
        raise ValueError(
            f"{name} for each kind of layer ({', '.join(kinds)}) is not supported; one for all is"
        )
    return dict(fields)


SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or ["(none)"]
    names = names if isinstance(names, list) else [names]
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if "text_config" in raw:
        raise ValueError(
            f"architecture {names[0]} has its language model under text_config, one part of"
            f" several (images, sound); only text models are supported: {supported}"
        )
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise ValueError(f"architecture {names[0]} is not supported; supported are {supported}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"activation hidden_act={activation!r} is not supported, only silu")
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization:
        named = isinstance(quantization, Mapping)
        method = quantization.get("quant_method", "unknown") if named else quantization
        raise ValueError(
            f"quantized checkpoints ({method}) are not supported; take the unquantized one"
        )


def _declared_dtype(raw: Mapping[str, Any]) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES[1:]:
        raise ValueError(
            f"weights of dtype {dtype!r} are not supported; supported are {', '.join(DTYPES[1:])}"
        )
    return dtype


def _norm_eps(raw: Mapping[str, Any]) -> float:
    eps = 1e-6 if raw.get("rms_norm_eps") is None else raw["rms_norm_eps"]
    require_number("config.json's rms_norm_eps", eps, 0)
    return float(eps)


def _num_kv_heads(raw: Mapping[str, Any], heads: int) -> int:
    kv_heads = _whole(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} must be divisible by num_key_value_heads={kv_heads}"
        )
    return kv_heads


def _head_dim(raw: Mapping[str, Any], heads: int) -> int:
    hidden = _whole(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"hidden_size={hidden} must be divisible by num_attention_heads={heads}, because"
            " config.json has no head_dim"
        )
    head_dim = _whole(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd, but RoPE turns pairs of values")
    return head_dim


def _max_position(raw: Mapping[str, Any], architecture: str) -> int:
    # Within its window, sliding-window attention is full attention: a model that has one is
    # served up to the window, exactly, and not beyond it.
    limit = _whole(raw, "max_position_embeddings")
    window = _sliding_window(raw, architecture)
    return limit if window is None else min(limit, window)


def _sliding_window(raw: Mapping[str, Any], architecture: str) -> int | None:
    listed = raw.get("layer_types") or []
    if not isinstance(listed, list):
        raise ValueError(f"layer_types={listed!r} in config.json is not a JSON list")
    kinds = set(map(str, listed))
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"layers of the kind {', '.join(others)} (layer_types) are not supported; supported"
            " are full_attention and sliding_attention"
        )
    # Where config.json is silent, this is what transformers assumes for the architecture.
    silent = not architecture.startswith("Qwen")
    uses = "sliding_attention" in kinds if kinds else _flag(raw, "use_sliding_window", silent)
    window = raw.get("sliding_window", 4096 if architecture == "MistralForCausalLM" else None)
    if uses and kinds and window is None:
        raise ValueError("layer_types has sliding_attention, but sliding_window is missing")
    if window is None or not uses:
        return None
    return _whole({"sliding_window": window}, "sliding_window")


def _whole(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _first(raw.get(name), default)
    if value is None:
        raise ValueError(f"config.json has no {name!r}; is the checkpoint complete?")
    require_int(f"config.json's {name}", value, 1, MAX_SIZE)
    return int(value)


def _flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = _first(raw.get(name), default)
    require_bool(f"config.json's {name}", value)
    return bool(value)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)
