"""Settings of the engine, checked once and then frozen, and the checks that other modules share.

Does not handle anything that needs a device or a file: `assembly.sizing.fill_in` fills in the
fields that are None here, and `model_config` describes a checkpoint. Not built in the course.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "torch", "cpu", "triton", "flash_attn")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every setting of an engine (`llm.config`).

    A field that is None is filled in when the engine is built, from the checkpoint, the device
    or the free memory; `llm.config` shows the value that was chosen.
    Raises TypeError for an unknown keyword, ValueError with the remedy for an impossible value.
    """

    # A built-in name ("smollm2-135m"), a checkpoint directory, or a name on the Hub
    # ("Qwen/Qwen3-0.6B", or "Qwen/Qwen3-0.6B@revision"). A `Path` is a directory, and becomes
    # the absolute path as a string.
    model: str = "smollm2-135m"
    # The directory of the checkpoint. None: found by the model's name.
    model_path: str | None = None
    # Type of weights, activations and KV cache. "auto": the checkpoint's, if the device is fast
    # at it, else float32 (CPU) or float16 (GPU).
    dtype: str = "auto"
    # "cpu", "cuda", "cuda:1"; "auto": a GPU if there is one.
    device: str = "auto"
    # Most requests that run at the same time: the number of device rows.
    # None: 32 on a CPU (beyond that its matrix units are full), 256 on a GPU.
    max_num_seqs: int | None = None
    # Token budget of one step. None: 512 on a CPU, 8192 on a GPU, 16384 on one with 64 GiB or
    # more. It bounds how long a running answer waits while another request's prompt is computed.
    max_num_batched_tokens: int | None = None
    # Most tokens of prompt and answer together. None: what the checkpoint was trained for, or
    # what the KV cache can hold if that is less.
    max_model_len: int | None = None
    # Tokens per KV block. 16 wastes at most 15 slots per request and shares prefixes finely.
    block_size: int = 16
    # Blocks in the KV cache. None: as many as memory allows.
    num_kv_blocks: int | None = None
    # Share of memory that the engine may fill. None: 0.9 of a GPU's memory; on a CPU a quarter
    # of the memory that is free now, and at most 1 GiB, so that a laptop does not swap.
    memory_utilization: float | None = None
    # Share of the blocks that admission of new requests leaves free for the running ones. On
    # nano-vllm's benchmark with 45,000 tokens of KV, 0.05 preempts 19 times, 0.06 13 times.
    watermark: float = 0.06
    # Whether to keep the KV blocks of finished requests and reuse them for equal prefixes.
    enable_prefix_caching: bool = True
    # Which kernels compute attention and the other operations: PyTorch's ("torch"); on a CPU
    # those of `cpu.ops` with packed weights ("cpu"); on a GPU Triton's ("triton"), or the same
    # with the attention of flash-attn ("flash_attn", for block_size=256). "auto": the fastest.
    attention_backend: str = "auto"
    # Whether to launch each operation of a decode step by itself instead of replaying a CUDA
    # graph: the engine starts faster and runs slower. None: graphs on a GPU. False on a CPU: a
    # recorder that follows the rules of graphs but isn't faster.
    enforce_eager: bool | None = None
    # Whether to launch a step before reading the previous one, so that the device never waits
    # for the host. None: on a GPU only; on a CPU, host and device share the cores.
    overlap: bool | None = None
    # Processes that share the model, each with its part of every layer (see `tensor_parallel`).
    # Each uses its own GPU, or its share of a CPU's cores.
    tensor_parallel_size: int = 1
    # Seconds that these processes wait for each other within a step before the engine stops.
    distributed_timeout_seconds: float = 60.0
    # Seed of the requests that have no seed of their own.
    seed: int = 0

    def __post_init__(self) -> None:
        require_text("model", self.model)
        if self.model_path is not None:
            require_text("model_path", self.model_path)
        require_choice("dtype", self.dtype, DTYPES)
        require_text("device", self.device)
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ValueError(f"device={self.device!r} must be auto, cpu, cuda or cuda:N")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_kv_blocks"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1)
        require_int("block_size", self.block_size, 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} must be a power of two; try 16")
        if self.memory_utilization is not None:
            require_number("memory_utilization", self.memory_utilization, 0, 1, open_low=True)
        require_number("watermark", self.watermark, 0, 0.5)
        require_bool("enable_prefix_caching", self.enable_prefix_caching)
        require_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        for name in ("enforce_eager", "overlap"):
            if getattr(self, name) is not None:
                require_bool(name, getattr(self, name))
        require_int("tensor_parallel_size", self.tensor_parallel_size, 1, 1024)
        timeout = self.distributed_timeout_seconds
        require_number("distributed_timeout_seconds", timeout, 0, open_low=True)
        require_int("seed", self.seed, 0, 2**63 - 1)
        self._check_budget()

    def _check_budget(self) -> None:
        # Every running request gets its token in every step, so a step must have room for all.
        tokens = self.max_num_batched_tokens
        seqs = self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}: a step could"
                f" not give every running request a token. Lower max_num_seqs to {tokens}"
            )


# -- checks that several modules share: each names the setting, its value and the limit --


def require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ValueError unless `value` is an int, not a bool, with `low <= value <= high`."""
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
        and abs(value) < math.inf  # also right for an int that no float can hold
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


def model_name(model: str | os.PathLike[str]) -> str:
    """Return the name of a model; a path becomes absolute, so that it is never taken for a
    built-in name or one on the Hub. `Path("~/x")` -> "/home/me/x"."""
    if isinstance(model, os.PathLike):
        return os.path.abspath(os.path.expanduser(model))
    return model


def replace(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return a copy of `config` with some fields changed and everything checked again."""
    return dataclasses.replace(config, **changes)


def known(value: int | None) -> int:
    """Return a setting that may be None until the engine is built, and is known from then on."""
    assert value is not None, "this setting is filled in by assembly.sizing.fill_in"
    return value
