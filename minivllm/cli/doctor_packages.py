"""The doctor on software: Python, the installation, and every package in its version.

Versions are compared with the lower bounds in minivllm's own metadata, so that they stand in one
place. Leaves out the machine itself (`cli.doctor_hardware`). Given (no notebook builds it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from minivllm.cli.machine import Machine, Requirement

State = Literal["ok", "missing", "problem"]

GET_STARTED = "see pytorch.org/get-started"
CPU_BUILD = f"get PyTorch from its CPU wheel index, {GET_STARTED}"

# What the absence of a package costs. All others: something that minivllm imports.
COSTS = {
    "torch": "nothing can be computed",
    "gguf": "the built-in model cannot be converted",
    "huggingface-hub": "models cannot be fetched from the Hub by name",
    "jupyterlab": "the notebooks need another editor",
    "ipywidgets": "pictures in notebooks stand still: they have no slider",
    "jupytext": "the notebooks cannot be built from the lessons",
    "matplotlib": "no pictures: `minivllm demo` prints text only",
    "nbclient": "the notebooks cannot be executed by `python -m course`",
    "nbformat": "the notebooks cannot be read by `python -m course`",
    "nbval": "`pytest --nbval` cannot check notebooks",
    "pytest": "no tests, and no checks of the course",
    "hypothesis": "the tests with random sequences cannot run",
    "transformers": "no comparison with transformers in the tests and benchmarks",
    "pytest-xdist": "the tests use one core",
    "numba": "on a CPU, PyTorch's operations are used instead of compiled kernels",
    "flash-attn": "on a GPU, attention is PyTorch's or Triton's",
    "triton": "the kernels of chapter 07 cannot run; the engine uses PyTorch's operations",
}
OPTIONAL = ("numba", "flash-attn")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    found: str  # what is there
    cost: str = ""  # what its absence, or its fault, costs
    remedy: str = ""  # one line, a command where possible
    required: bool = False  # whether minivllm is of no use before this is ok


def check_python(machine: Machine) -> list[Finding]:
    """The interpreter is new enough."""
    found = ".".join(map(str, machine.python))
    minimum = machine.python_minimum
    if minimum is None or machine.python >= _numbers(minimum):
        return [Finding("Python", "ok", found, required=True)]
    remedy = f"make an environment with Python {minimum} or newer: python3.12 -m venv .venv"
    found = f"{found}, which is older than {minimum}"
    return [Finding("Python", "problem", found, "minivllm does not load", remedy, required=True)]


def check_installation(machine: Machine) -> list[Finding]:
    """minivllm is installed, and from here."""
    here, there = machine.root, machine.installed_root
    remedy = f'pip install -e "{here}[course]"'
    if machine.requirements is None:
        found, cost = f"runs from {here}, not installed", "no command `minivllm`, no known versions"
        return [Finding("minivllm", "missing", found, cost, remedy)]
    if there is not None and there != here:
        found = f"this one is in {here}, the installed one in {there}"
        cost = "notebooks and the command `minivllm` may run the other one"
        return [Finding("minivllm", "problem", found, cost, remedy)]
    return [Finding("minivllm", "ok", f"installed from {here}")]


def check_course(machine: Machine) -> list[Finding]:
    """The folder of the course lies beside the package."""
    if machine.has_course:
        return [Finding("course", "ok", "its folder is here")]
    cost = "the engine works, but the notebooks have nothing to check your work with"
    remedy = 'clone the repository and run pip install -e ".[course]" in it'
    return [Finding("course", "missing", f"no folder course in {machine.root}", cost, remedy)]


def check_packages(machine: Machine) -> list[Finding]:
    """Everything that minivllm needs, in the versions that its metadata asks for."""
    requirements = machine.requirements
    if requirements is None:  # then only what is there and does not load can be told
        requirements = tuple(Requirement(name) for name in sorted(machine.versions))
    needed = [r for r in requirements if r.extra is None and r.name not in (*OPTIONAL, "pip")]
    return _package_findings("packages", needed, machine, required=True)


def check_course_packages(machine: Machine) -> list[Finding]:
    """What the notebooks and the tests need besides."""
    needed = [r for r in machine.requirements or () if r.extra == "course"]
    return _package_findings("for the course", needed, machine, required=False)


def check_optional_packages(machine: Machine) -> list[Finding]:
    """Packages that make it faster."""
    known = {r.name: r for r in machine.requirements or ()}
    has_gpu = machine.torch is not None and bool(machine.torch.gpus)
    wanted = [known.get(name, Requirement(name)) for name in OPTIONAL]
    wanted = [r for r in wanted if has_gpu or r.name != "flash-attn"]
    return _package_findings("to be faster", wanted, machine, required=False)


def _package_findings(
    title: str, requirements: list[Requirement], machine: Machine, *, required: bool
) -> list[Finding]:
    findings, good = [], []
    for requirement in requirements:
        if requirement.platform not in (None, machine.platform) or requirement.name == "triton":
            continue
        finding = package(requirement, machine, required)
        if finding is None:
            good.append(f"{requirement.name} {machine.versions[requirement.name]}")
        else:
            findings.append(finding)
    summary = [Finding(title, "ok", ", ".join(good))] if good else []
    return summary + findings


def package(requirement: Requirement, machine: Machine, required: bool) -> Finding | None:
    """What is wrong with one package; None if nothing is."""
    name, minimum = requirement.name, requirement.minimum
    version, said = machine.versions.get(name), machine.broken.get(name)
    command = _install(requirement, machine)
    cost = COSTS.get(name.lower().replace("_", "-"), "minivllm imports it and stops without it")
    if version is None:
        return Finding(name, "missing", "not installed", cost, command, required)
    if said is not None:
        again = f"pip install --force-reinstall --no-cache-dir {name}"
        again = f"install PyTorch again, {GET_STARTED}" if name == "torch" else again
        found = f"{version} is installed but does not load: {said}"
        return Finding(name, "problem", found, cost, again, required)
    if minimum and _numbers(version) < _numbers(minimum):
        found = f"{version} is older than {minimum}"
        return Finding(name, "problem", found, "it is not tested and may fail", command, required)
    return None


def _install(requirement: Requirement, machine: Machine) -> str:
    name, is_new = requirement.name, requirement.name not in machine.versions
    if requirement.extra == "course" and is_new:
        return f'pip install -e "{machine.root}[course]"'
    wanted = f'"{name}>={requirement.minimum}"' if requirement.minimum else name
    command = f"pip install {wanted}" if is_new else f"pip install -U {wanted}"
    if name == "torch" and machine.platform == "linux" and not machine.has_nvidia:
        # From the usual index, Linux gets the build with CUDA.
        return f"{command}; for a machine without a GPU first {CPU_BUILD}"
    return command


def _numbers(version: str) -> tuple[int, ...]:
    # "2.13.0+cpu" -> (2, 13), "3.12rc1" -> (3, 12): zeros at the end say nothing.
    numbers = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-zA-Z]", version)[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
