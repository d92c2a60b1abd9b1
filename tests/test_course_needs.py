"""Without Triton (it is made for Linux alone) chapter 07 says so, and nothing fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from course import needs
from course.verdict import check

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def no_triton(monkeypatch):
    """As on macOS and Windows."""
    monkeypatch.setattr(needs, "find_spec", lambda name: None)


@pytest.fixture
def without_triton(tmp_path):
    """The environment of a process in which Triton cannot be imported."""
    lines = "import sys; sys.modules['triton'] = None"
    (tmp_path / "sitecustomize.py").write_text(lines)
    paths = [str(tmp_path), str(ROOT)]
    drop = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER")
    rest = {k: v for k, v in os.environ.items() if k not in drop}
    return rest | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        ("import triton\n", True),
        ("import os\nimport triton.language as tl\n", True),
        ("from triton import jit", True),
        ("import tritonclient", False),
        ("    import triton  # where it is needed, with something else to do without it", False),
        ("# import triton", False),
    ],
)
def test_only_what_imports_triton_lacks_it(no_triton, text, wants):
    """A module that cannot be imported without it, and no other."""
    assert (needs.lacking(text) is not None) is wants


def test_nothing_is_lacking_where_triton_is():
    """Whatever the code imports."""
    pytest.importorskip("triton")
    assert needs.lacking("import triton\n") is None


def test_a_check_says_what_it_needs_and_fails_nothing(no_triton):
    """No exception, although the exercise is still borrowed."""
    text = check("kernels.tile_places")
    assert text.startswith("– tile_places: not checked. It needs Linux: ")
    assert "WSL 2" in text and "container" in text


@pytest.mark.course
def test_a_check_in_a_terminal_ends_well(without_triton):
    """The real thing: exit code 0."""
    command = [sys.executable, "-m", "course", "check", "kernels.tile_places"]
    ran = subprocess.run(
        command, cwd=ROOT, env=without_triton, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert "not checked. It needs Linux" in ran.stdout


@pytest.mark.course
def test_the_notebook_is_skipped(without_triton):
    """`pytest --nbval` reports its cells as skipped, with the reason."""
    command = [sys.executable, "-m", "pytest", "--nbval", "solutions/07_kernels.ipynb", "-q", "-rs"]
    command += ["-p", "no:cacheprovider"]
    ran = subprocess.run(
        command, cwd=ROOT, env=without_triton, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert "needs Linux" in ran.stdout and " skipped in" in ran.stdout, ran.stdout[-2000:]
