"""Gate 7: what is installed from the wheel, and what conda is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from course import files

SETUPTOOLS = 77  # the one that pyproject.toml asks for
COURSE_LINE = "- -e .[course]"
EXPECTED_LINES = ("- conda-forge", "- pip", "- pip:", COURSE_LINE, "- -e .")
PROBE = """
import sys, minivllm, minivllm.scheduler, minivllm.block_manager
assert "torch" not in sys.modules, "importing the control plane brings torch"
print(minivllm.__file__)
"""


def wheel_problems() -> list[str]:
    """Build the wheel of a copy of the tree, look into it, install it, import from it."""
    with tempfile.TemporaryDirectory(prefix="minivllm-wheel-") as name:
        work = Path(name).resolve()
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(files.HOME / "minivllm", work / "tree" / "minivllm", ignore=skip)
        shutil.copytree(files.HOME / "course", work / "tree" / "course", ignore=skip)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(files.HOME / file, work / "tree")
        isolation = [] if old_setuptools() else ["--no-build-isolation"]
        built = pip("wheel", "--no-deps", *isolation, "-w", str(work), str(work / "tree"))
        wheels = list(work.glob("*.whl"))
        if built.returncode or not wheels:
            return [f"The wheel does not build; see pyproject.toml:\n{built.stdout[-2000:]}"]
        return content_problems(wheels[0]) or import_problems(wheels[0], work / "target")


def old_setuptools() -> bool:
    """Whether this environment cannot build by itself, and pip has to fetch setuptools."""
    try:
        return int(version("setuptools").split(".")[0]) < SETUPTOOLS
    except PackageNotFoundError:
        return True


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip; what it says is in `stdout`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def content_problems(wheel: Path) -> list[str]:
    """The wheel holds the package, all of it, and nothing else."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    foreign = sorted({name.split("/")[0] for name in names if not name.startswith("minivllm/")})
    wanted = {
        path.relative_to(files.HOME).as_posix() for path in (files.HOME / "minivllm").rglob("*.py")
    }
    problems = []
    if foreign:
        problems.append(
            f"The wheel holds {', '.join(foreign)}: [tool.setuptools] packages in pyproject.toml"
            " must name minivllm alone"
        )
    if missing := sorted(wanted - names):
        problems.append(f"The wheel lacks {', '.join(missing)}: see packages in pyproject.toml")
    return problems


def import_problems(wheel: Path, target: Path) -> list[str]:
    """Installed alone in a folder, the control plane imports from there and without torch."""
    pip("install", "--no-deps", "--target", str(target), str(wheel))
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=target,
        env=variables | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        return [f"The installed wheel does not import. Repair this:\n{result.stderr[-2000:]}"]
    if not result.stdout.strip().startswith(str(target)):
        return [f"The wheel was not what was imported, but {result.stdout.strip()}"]
    return []


# -- environment.yml ---------------------------------------------------------------------------


def environment_problems() -> list[str]:
    """environment.yml installs the course through pyproject.toml, with a Python that it allows."""
    conda = (files.HOME / "environment.yml").read_text("utf-8")
    project = (files.HOME / "pyproject.toml").read_text("utf-8")
    lines = [line.strip() for line in conda.splitlines() if not line.strip().startswith("#")]
    problems = []
    if COURSE_LINE not in lines:
        problems.append(f"environment.yml must install the course by the line: {COURSE_LINE}")
    extra = [line for line in lines if line.startswith("- ") and not expected(line)]
    if extra:
        problems.append(
            f"environment.yml names {extra}; requirements belong in pyproject.toml only"
        )
    python = re.search(r"^\s*- python=(\d+)\.(\d+)", conda, re.MULTILINE)
    lowest = re.search(r'requires-python = ">=(\d+)\.(\d+)"', project)
    if not python or not lowest or pair(python) < pair(lowest):
        problems.append(
            "environment.yml must name a `python=X.Y` that requires-python in pyproject.toml allows"
        )
    if not re.search(r"^course = \[", project, re.MULTILINE):
        problems.append(
            "pyproject.toml must have the extra `course`, which environment.yml installs"
        )
    return problems


def expected(line: str) -> bool:
    """Whether a dependency of environment.yml belongs there."""
    return line.startswith("- python=") or line in EXPECTED_LINES


def pair(match: re.Match[str]) -> tuple[int, int]:
    """(3, 12) of a version."""
    return int(match[1]), int(match[2])
