"""Right answers in other styles than ours pass the checks of their exercises.

`tests/alternatives/NN_name.py` holds them, each under `@answer("module.name")`; the files are
read, never imported. Round k puts the answer number k of every exercise into a copy of the package
and runs all checks once.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course import splice

pytestmark = pytest.mark.course

ROOT = Path(__file__).resolve().parents[1]


def read_answers():
    """The sources of the right answers of each exercise."""
    answers = {}
    for path in sorted((ROOT / "tests/alternatives").glob("*.py")):
        text = path.read_text("utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                marker = node.decorator_list[0]
                lines = text.split("\n")[marker.end_lineno : node.end_lineno]
                answers.setdefault(marker.args[0].value, []).append("\n".join(lines))
    return answers


ANSWERS = read_answers()


@pytest.mark.parametrize("number", range(max(len(sources) for sources in ANSWERS.values())))
def test_right_answers_pass(number, tmp_path):
    """In one process, with the copy of the package before ours on the path."""
    shutil.copytree(ROOT / "minivllm", tmp_path / "minivllm")
    tests = set()
    for name, sources in ANSWERS.items():
        if number < len(sources):
            module, inner = name.split(".", 1)
            tests.add(str(ROOT / "tests" / f"test_{module}.py"))
            path = tmp_path / "minivllm" / f"{module}.py"
            path.write_text(splice.put(path.read_text("utf-8"), inner, sources[number]), "utf-8")
    options = ["-q", "--noconftest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    chosen = ["-m", "exercise and not slow and not gpu and not model", *sorted(tests)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-1000:]
