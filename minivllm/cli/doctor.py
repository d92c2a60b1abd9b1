"""`minivllm doctor`: what is here, what is missing, what that costs, and the line that repairs it.

Each check turns facts about the machine (`machine`) into findings; none fetches, changes or
raises anything. Leaves out the checks (`cli.doctor_packages`, `cli.doctor_hardware`). Given (no
notebook builds it).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from minivllm.cli import doctor_hardware, doctor_packages
from minivllm.cli.doctor_packages import OPTIONAL, Finding, State
from minivllm.cli.machine import Machine, look
from minivllm.waiting import waiting

MARKS: dict[State, str] = {"ok": "[ok]", "missing": "[--]", "problem": "[!!]"}

CHECKS: tuple[Callable[[Machine], list[Finding]], ...] = (
    doctor_packages.check_python,
    doctor_packages.check_installation,
    doctor_packages.check_packages,
    doctor_packages.check_course,
    doctor_packages.check_course_packages,
    doctor_packages.check_optional_packages,
    doctor_hardware.check_torch,
    doctor_hardware.check_gpu,
    doctor_hardware.check_triton,
    doctor_hardware.check_backend,
    doctor_hardware.check_processor,
    doctor_hardware.check_threads,
    doctor_hardware.check_load,
    doctor_hardware.check_model,
    doctor_hardware.check_disk,
    doctor_hardware.check_memory,
    doctor_hardware.check_hub,
)


def run_doctor(arguments: Any = None) -> int:
    """Print the report. The exit code: 0, or 1 if something that is required is broken."""
    with waiting("looking at this machine"):
        findings = checks()
    print(format_report(findings))
    return int(any(finding.required and finding.state != "ok" for finding in findings))


def checks(machine: Machine | None = None) -> list[Finding]:
    """Every finding about `machine`, by default the one that this runs on. Never raises."""
    if machine is None:
        machine = look(OPTIONAL)
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(machine)
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(_unchecked(name, f"{type(error).__name__}: {error}"))
    return findings + [_unchecked(name, said) for name, said in machine.failed.items()]


def format_report(findings: Iterable[Finding]) -> str:
    """The findings as lines of text, readable without colour; what costs something is below it."""
    listed = list(findings)
    width = max((len(finding.name) for finding in listed), default=0)
    lines = []
    for finding in listed:
        lines += _indented(f"{MARKS[finding.state]} {finding.name:<{width}}  ", finding.found)
        if finding.state != "ok":
            lines += _indented("       costs: ", finding.cost) if finding.cost else []
            lines += _indented("       do:    ", finding.remedy) if finding.remedy else []
    broken = [finding.name for finding in listed if finding.required and finding.state != "ok"]
    end = f"Repair this first: {', '.join(broken)}" if broken else "Everything required is there"
    return "\n".join([*lines, "", "[ok] there   [--] not there   [!!] at fault", f"{end}."])


def _indented(head: str, text: str) -> list[str]:
    rest = " " * len(head)
    # A command must stay in one piece to be copied, so lines break at spaces alone.
    wrapped = textwrap.wrap(
        text, 100 - len(head), break_long_words=False, break_on_hyphens=False
    ) or [""]
    return [head + wrapped[0], *(rest + line for line in wrapped[1:])]


def _unchecked(name: str, said: str) -> Finding:
    return Finding(name, "problem", f"could not be looked at ({said})", "it is left out here")
