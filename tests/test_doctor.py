"""The doctor's report: complete, readable, never an exception, and an exit code that counts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import GOOD, LAPTOP, differs, with_version, without

from minivllm.cli import doctor
from minivllm.cli.doctor import checks, format_report, run_doctor
from minivllm.cli.doctor_packages import Finding
from minivllm.cli.machine import Machine


def states(machine):
    """name -> state of every finding."""
    return {finding.name: finding.state for finding in checks(machine)}


def test_a_good_machine_has_nothing_but_good_findings():
    """Every check has looked, and none complains."""
    found = states(GOOD)
    assert set(found.values()) == {"ok"}
    for name in ("Python", "packages", "PyTorch", "GPU", "Triton", "threads", "memory", "disk"):
        assert name in found


def test_a_laptop_misses_the_gpu_alone():
    """And needs no repair."""
    assert {name for name, state in states(LAPTOP).items() if state != "ok"} == {"GPU"}


@pytest.mark.parametrize(
    "machine",
    [
        LAPTOP,
        differs(requirements=None, installed_root=None),
        differs(has_course=False),
        differs(installed_root=Path("/old")),
        without("numpy", "torch", "nbval", "numba", "triton"),
        with_version("numpy", "1.0"),
        differs(broken={"torch": "OSError: no"}, torch=None),
        differs(environment={"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}),
        differs(free_memory=0, num_cores=1),
        differs(failed={"memory": "OSError: no"}),
    ],
)
def test_what_is_not_ok_says_what_it_costs(machine):
    """And, but for a GPU that one would have to buy, what to do."""
    bad = [finding for finding in checks(machine) if finding.state != "ok"]
    assert bad
    for finding in bad:
        assert finding.found and finding.cost, finding
        assert finding.remedy or finding.name in ("GPU", "memory"), finding
        assert "\n" not in finding.found + finding.cost + finding.remedy


def test_a_machine_of_which_nothing_is_known_is_no_error():
    """Every look failed, or found nothing."""
    assert isinstance(format_report(checks(Machine())), str)


def test_a_check_that_fails_becomes_a_finding(monkeypatch):
    """The others go on."""

    def check_the_weather(machine):
        raise OSError("no window")

    monkeypatch.setattr(doctor, "CHECKS", (check_the_weather, *doctor.CHECKS))
    first, *others = checks(GOOD)
    assert (first.name, first.state) == ("the weather", "problem")
    assert "OSError: no window" in first.found
    assert others == [f for check in doctor.CHECKS[1:] for f in check(GOOD)]


def test_a_look_that_failed_is_told():
    """Nothing that was not seen is passed over in silence."""
    finding = checks(differs(failed={"memory": "OSError: no /proc"}))[-1]
    assert (finding.name, finding.state) == ("memory", "problem")
    assert "OSError: no /proc" in finding.found


def test_the_report_is_readable_without_colour():
    """A mark, the name, what is there; cost and remedy only below what is not ok."""
    report = format_report(
        [
            Finding("numpy", "ok", "2.0", "unseen", "unseen"),
            Finding("Triton", "missing", "not installed", "no kernels", "pip install triton"),
            Finding("torch", "problem", "does not load", "nothing runs", "reinstall", True),
        ]
    )
    assert report.splitlines() == [
        "[ok] numpy   2.0",
        "[--] Triton  not installed",
        "       costs: no kernels",
        "       do:    pip install triton",
        "[!!] torch   does not load",
        "       costs: nothing runs",
        "       do:    reinstall",
        "",
        "[ok] there   [--] not there   [!!] at fault",
        "Repair this first: torch.",
    ]
    assert format_report([]).endswith("Everything required is there.")
    assert report.isascii()


def test_long_lines_are_broken_at_spaces():
    """100 columns; what follows stands below the text, and a path stays in one piece."""
    path = "/" + "-".join(["very"] * 30)
    lines = format_report([Finding("x", "ok", f"{'word ' * 30}{path}")]).splitlines()
    assert max(len(line) for line in lines if path not in line) <= 100
    assert lines[1].startswith("        word")
    assert any(line.strip() == path for line in lines)


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        (GOOD, 0),
        (LAPTOP, 0),
        (without("nbval", "numba", "triton"), 0),
        (differs(installed_root=Path("/old")), 0),
        (with_version("transformers", "4.0"), 0),
        (without("numpy"), 1),
        (with_version("numpy", "1.0"), 1),
        (differs(broken={"torch": "OSError"}), 1),
        (differs(python=(3, 9, 0)), 1),
    ],
)
def test_the_exit_code_counts_what_is_required(monkeypatch, capsys, machine, code):
    """0 unless minivllm is of no use here."""
    monkeypatch.setattr(doctor, "look", lambda packages: machine)
    assert run_doctor() == code
    out = capsys.readouterr().out
    assert ("Repair this first" in out) == bool(code)


@pytest.mark.long
def test_the_real_machine_is_looked_at_in_a_fresh_python():
    """From the import to the report; nothing is fetched, whatever the cache says."""
    code = "import sys; from minivllm.cli.doctor import run_doctor; sys.exit(run_doctor())"
    root = Path(doctor.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "MINIVLLM_CACHE": str(root / "nowhere" / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 0, ran.stdout
    assert "[ok] Python" in ran.stdout
    assert "not here yet" in ran.stdout
    assert not (root / "nowhere").exists()


def test_the_doctor_itself_loads_nothing_heavy():
    """It must start where everything else does not."""
    code = (
        "import sys, minivllm.cli.doctor; print(*{'torch', 'numpy', 'psutil'} & set(sys.modules))"
    )
    root = Path(doctor.__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == ""
