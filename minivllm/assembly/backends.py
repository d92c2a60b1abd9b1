"""Choose the kernels that an engine runs on, from the setting `attention_backend`.

    name         device   operations            products       sampler
    torch        any      ops                   plain          sampler.sample
    cpu          CPU      cpu.ops               cpu.packed's   sampler.sample
    triton       GPU      gpu.ops               plain          sampler.sample_gumbel with a kernel
    flash_attn   GPU      gpu.flash_attention   plain          the same

Not built in the course.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from minivllm import ops, sampler
from minivllm.cpu import ops as cpu_ops
from minivllm.cpu.packed import pack
from minivllm.model import CausalLM
from minivllm.model_runner import Sample


def _as_it_is(model: CausalLM) -> CausalLM:
    return model


class Backend(NamedTuple):
    """What an engine takes from its backend."""

    ops: Any  # see `model.Ops` and `model_runner.RunnerOps`
    sample: Sample
    prepare: Callable[[CausalLM], CausalLM] = _as_it_is  # changes a loaded model, and returns it
    # Whether a CUDA graph can hold the attention over prompts: torch's asks for their lengths.
    captures_prompts: bool = False


def choose_backend(
    name: str, device: torch.device, block_size: int, head_dim: int, dtype: torch.dtype
) -> str:
    """Return the backend called `name`; "auto" is the fastest one that is available and suits the
    settings.

    Raises ValueError, with the remedy, for a backend that cannot be used here.
    """
    if name == "auto":
        return _best(device, block_size, head_dim, dtype)
    problem = _problem(name, device, block_size, head_dim, dtype)
    if problem is not None:
        raise ValueError(f"attention_backend={name!r} cannot be used: {problem}; take 'auto'")
    return name


def _best(device: torch.device, block_size: int, head_dim: int, dtype: torch.dtype) -> str:
    order = ("flash_attn", "triton", "torch") if device.type == "cuda" else ("cpu", "torch")
    settings = (device, block_size, head_dim, dtype)
    return next(name for name in order if _problem(name, *settings) is None)


def _problem(
    name: str, device: torch.device, block_size: int, head_dim: int, dtype: torch.dtype
) -> str | None:
    """Return why the backend cannot be used here, or None if it can."""
    if name == "torch":
        return None
    if name == "cpu":
        return None if device.type == "cpu" else f"it runs on a CPU, and the device is {device}"
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"it runs on an NVIDIA GPU, and the device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton; Linux only)"
    if interpreted and dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly; set dtype='float32'"
    if name == "flash_attn":
        from minivllm.gpu.flash_attention import why_not

        return why_not(block_size, head_dim, dtype)
    return None


def load_backend(name: str) -> Backend:
    """Return the operations and the sampler of a backend that `choose_backend` has accepted."""
    if name == "torch":
        return Backend(ops, sampler.sample)
    if name == "cpu":
        return Backend(cpu_ops, sampler.sample, pack)
    # Imported here alone: Triton is not everywhere.
    from minivllm.gpu import flash_attention
    from minivllm.gpu import ops as gpu_ops
    from minivllm.gpu.sampling_kernels import gumbel_sample

    step_ops = flash_attention if name == "flash_attn" else gpu_ops
    sample = partial(sampler.sample_gumbel, gumbel=gumbel_sample)
    return Backend(step_ops, sample, captures_prompts=True)
