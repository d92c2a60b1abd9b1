"""What this machine has and what the engine uses of it: device, dtype, memory.

Does not decide how much of the memory goes where (see `assembly.sizing`). Not built in the course.
"""

from __future__ import annotations

import warnings

import psutil
import torch

from minivllm.cpu.packed import cpu_has_bfloat16 as cpu_has_bfloat16
from minivllm.kv_cache import CPU_MEMORY_CAP, CPU_MEMORY_SHARE, GPU_MEMORY_SHARE


def choose_device(name: str) -> torch.device:
    """Return the device called `name`: "auto", "cpu", "cuda" or "cuda:N"; "auto" is a GPU if
    there is one. Raises ValueError for a GPU that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={name!r}: PyTorch sees {count} GPUs here; try device='auto'")
    return device


def choose_dtype(name: str, declared: str, device: torch.device) -> torch.dtype:
    """Return the type to compute in. "auto" is the checkpoint's type if the device computes it
    fast, else float32 on a CPU, float16 on a GPU (with a warning)."""
    wanted = declared if name == "auto" else name
    if device.type == "cuda":
        if wanted == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            warnings.warn("this GPU has no bfloat16; computing in float16", stacklevel=2)
            wanted = "float16"
        elif name == "auto" and wanted == "float32":
            wanted = "float16"
    elif name == "auto" and not (wanted == "bfloat16" and cpu_has_bfloat16()):
        wanted = "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]


LARGE_GPU = 64 * 2**30  # bytes of memory; such a GPU is fast as well


def step_tokens(device: torch.device) -> int:
    """Return the default token budget per step. It bounds how long a running answer waits for the
    prompt of another request; a larger one keeps a fast GPU busy while the host launches.
    """
    if device.type != "cuda":
        return 512
    return 16384 if torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU else 8192


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def kv_budget(share: float | None, device: torch.device) -> int:
    """Return the bytes that the KV cache and a step's activations may take, after the weights
    are loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - (share or GPU_MEMORY_SHARE)) * total)
    available = psutil.virtual_memory().available
    if share is None:
        return min(int(available * CPU_MEMORY_SHARE), CPU_MEMORY_CAP)
    return int(available * share)
