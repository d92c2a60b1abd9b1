"""Settings of the engine and facts about a checkpoint: checked once, then frozen.

Leaves out everything that needs a device or a file: `engine.build_engine` fills the fields
that are None here. Given (no notebook builds it).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every setting of an engine, in one flat frozen place (`llm.config`).

    A field that may be None is filled in when the engine is built, from the checkpoint, the
    device or the free memory; `llm.config` shows the value that was chosen.
    An unknown keyword is a TypeError, an impossible value a ValueError with the remedy.
    """

    # A built-in name ("smollm2-135m") or a checkpoint directory.
    model: str = "smollm2-135m"
    # The directory that `model` stands for. None: looked up by name.
    model_path: str | None = None
    # Type of weights, activations and KV cache. "auto": what the checkpoint declares, where
    # the device is fast at it, else float32 (CPU) or float16 (GPU).
    dtype: str = "auto"
    # "cpu", "cuda", "cuda:1"; "auto": a GPU where there is one.
    device: str = "auto"
    # Requests that run at the same time, at most: the number of device rows.
    # None: 32 on a CPU (past that its matrix units are full), 256 on a GPU.
    max_num_seqs: int | None = None
    # Tokens computed in one step, at most. None: 512 on a CPU, 8192 on a GPU: about as long
    # as a running answer may have to wait for somebody else's prompt.
    max_num_batched_tokens: int | None = None
    # Tokens of prompt and answer together, at most. None: what the checkpoint was trained
    # for, or what the KV cache can hold if that is less.
    max_model_len: int | None = None
    # Tokens per KV block. 16 wastes at most 15 slots per request and shares prefixes finely.
    block_size: int = 16
    # Blocks in the KV cache. None: as many as memory allows.
    num_kv_blocks: int | None = None
    # Share of memory the engine may fill. None: 0.9 of a GPU's memory; on a CPU a quarter of
    # the memory that is free now, and 1 GiB at most, so that a laptop does not swap.
    memory_utilization: float | None = None
    # Share of the blocks that admission of new requests leaves free for those that run. On
    # nano-vllm's benchmark with 45,000 tokens of KV, 0.05 preempts 19 times, 0.06 13 times.
    watermark: float = 0.06
    # Keep the KV blocks of finished requests and reuse them for equal prefixes.
    enable_prefix_caching: bool = True
    # Seed of all requests that bring none of their own.
    seed: int = 0

    def __post_init__(self) -> None:
        require_text("model", self.model)
        if self.model_path is not None:
            require_text("model_path", self.model_path)
        require_choice("dtype", self.dtype, DTYPES)
        require_text("device", self.device)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_kv_blocks"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1)
        require_int("block_size", self.block_size, 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} is no power of two; try 16")
        if self.memory_utilization is not None:
            require_number("memory_utilization", self.memory_utilization, 0, 1, open_low=True)
        require_number("watermark", self.watermark, 0, 0.5)
        require_bool("enable_prefix_caching", self.enable_prefix_caching)
        require_int("seed", self.seed, 0, 2**63 - 1)
        self._check_budget()

    def _check_budget(self) -> None:
        # Every running request gets its token in every step, so a step must have room for all.
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}: a step could"
                f" not give every running request a token. Lower max_num_seqs to {tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What `config.json` says of a decoder, in one set of names for every architecture."""

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

        Raises ValueError, naming it, for an architecture, RoPE scaling or activation that is
        not supported, and for a field that is missing.
        """
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        heads = _field(raw, "num_attention_heads")
        llama_bias = architecture == "LlamaForCausalLM" and bool(raw.get("attention_bias", False))
        qwen3_bias = architecture == "Qwen3ForCausalLM" and bool(raw.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_field(raw, "vocab_size"),
            hidden_size=_field(raw, "hidden_size"),
            num_layers=_field(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or _field(raw, "hidden_size") // heads,
            intermediate_size=_field(raw, "intermediate_size"),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_dict(raw),
            max_position=_max_position(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or llama_bias or qwen3_bias,
            o_bias=llama_bias or qwen3_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        )


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is stretched for long contexts."""

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
        rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _REQUIRED_BY_ROPE:
            raise ValueError(
                f"RoPE scaling {kind!r} is not supported; supported are default, linear, llama3"
            )
        missing = [name for name in _REQUIRED_BY_ROPE[kind] if rope.get(name) is None]
        if missing:
            raise ValueError(f"RoPE scaling {kind!r} lacks {', '.join(missing)} in config.json")
        partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
        if partial != 1.0:
            raise ValueError(f"partial_rotary_factor={partial} is not supported; only 1.0 is")
        return cls(
            theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
            kind=kind,
            factor=rope.get("factor", 1.0),
            low_freq_factor=rope.get("low_freq_factor", 1.0),
            high_freq_factor=rope.get("high_freq_factor", 4.0),
            original_max_position=rope.get("original_max_position_embeddings")
            or raw.get("original_max_position_embeddings")
            or raw.get("max_position_embeddings", 8192),
        )


_REQUIRED_BY_ROPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or ["(none)"]
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise ValueError(
        f"architecture {names[0]} is not supported; supported are "
        + ", ".join(SUPPORTED_ARCHITECTURES)
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"activation hidden_act={raw['hidden_act']!r} is not supported, only silu")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"quantized checkpoints ({method}) are not supported; take the unquantized one"
        )


def _max_position(raw: Mapping[str, Any]) -> int:
    # Within its window, sliding-window attention is full attention: so a model that has one
    # is served up to the window, exactly, and not beyond it.
    limit = int(_field(raw, "max_position_embeddings"))
    window = raw.get("sliding_window")
    uses_window = raw.get("use_sliding_window", True) and window is not None
    return min(limit, int(window)) if uses_window and window is not None else limit


def _field(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"config.json has no {name!r}; is the checkpoint complete?")
    return raw[name]


# -- checks that several modules share: each names the setting, its value and what is allowed --


def require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ValueError unless `value` is an int (and no bool) with `low <= value <= high`."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{name}={value!r} must be a whole number {limit}")


def require_number(
    name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
    """Raise ValueError unless `value` is a finite number with `low <= value <= high`
    (`low < value` with `open_low`)."""
    ok = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
        and not (open_low and value == low)
    )
    if not ok:
        above = "above" if open_low else "of at least"
        limit = f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{name}={value!r} must be a finite number {above} {low:g}{limit}")


def require_bool(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def require_text(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={value!r} must be a non-empty string")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")


def replace(config: EngineConfig, **changes: Any) -> EngineConfig:
    """A copy of `config` with some fields changed and everything checked again."""
    return dataclasses.replace(config, **changes)


def set_value(value: int | None) -> int:
    """A setting that may be None until the engine is built, where it must be set by now."""
    assert value is not None, "this setting is filled in by engine.fill_in"
    return value
