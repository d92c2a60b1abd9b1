"""What is built runs: in every engine of the kernel, also in those made before."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from course import living, sandbox

pytestmark = [pytest.mark.course, pytest.mark.long]

SCRIPT = Path(__file__).parent / "one_kernel.py"


def test_every_engine_runs_the_newest_version_of_every_exercise(tmp_path):
    """Or the build names the engine that does not, and what to run."""
    with sandbox.temporary(reference=True) as folder:
        variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, str(SCRIPT)],
            cwd=folder,
            env=sandbox.environment(folder) | variables,
            capture_output=True,
            text=True,
        )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


COMPILED = """
import sys
from course import reload
from course.exercises import exercises, lay
from minivllm import decode_attention, kernels
from minivllm.gpu import prefill_attention

def keys():
    found = [decode_attention._attend_kernel, decode_attention.attend_tile, kernels.slots_of]
    found += [k for n, k in vars(prefill_attention).items() if reload._is_kernel(k)]
    return [kernel.cache_key for kernel in found]

held, before = decode_attention._attend_kernel, keys()
source = exercises()["kernels.slots_of"].reference
source = source.replace("return ", "positions = positions + 0\\n    return ")
lay({"kernels.slots_of": source}, True)
reload.import_again({"minivllm.kernels"}, {})
assert decode_attention._attend_kernel is held and not held.device_caches
print([old != new for old, new in zip(before, keys())])
"""


def test_compiled_kernels_that_call_a_changed_one_are_compiled_anew(tmp_path):
    """Their cached code holds that of the kernel they call; nothing is launched here."""
    with sandbox.temporary(reference=True) as folder:
        run = subprocess.run(
            [sys.executable, "-c", COMPILED],
            env={k: v for k, v in sandbox.environment(folder).items() if k != "TRITON_INTERPRET"},
            capture_output=True,
            text=True,
        )
    assert run.stdout.strip() == str([True] * run.stdout.count("True")), run.stderr[-2000:]
    assert run.stdout.count("True") >= 4


INJECTED = """
from course import reload
from course.exercises import exercises, lay
from minivllm import kernels
from triton.runtime import interpreter

namespace = {"interpreter_semantic": interpreter.interpreter_semantic}
vars(kernels)["interpreter_semantic"] = interpreter.interpreter_semantic
source = exercises()["kernels.slots_of"].reference
source = source.replace("return ", "positions = positions + 0\\n    return ")
lay({"kernels.slots_of": source}, True)
reload.import_again({"minivllm.kernels"}, namespace)
print(namespace["interpreter_semantic"] is interpreter.interpreter_semantic)
"""


def test_names_that_triton_puts_into_a_notebook_stay():
    """Its interpreter puts its own names where a kernel is defined: kernels of the notebook need
    them after a build, too."""
    with sandbox.temporary(reference=True) as folder:
        run = subprocess.run(
            [sys.executable, "-c", INJECTED],
            env=sandbox.environment(folder) | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
    assert run.stdout.strip() == "True", run.stderr[-2000:]


def engine(**config):
    """What `living` looks at in an engine."""
    settings = {"tensor_parallel_size": 1, "enforce_eager": True} | config
    return SimpleNamespace(config=SimpleNamespace(**settings), runner=SimpleNamespace(group=None))


@pytest.mark.parametrize(
    ("name", "made", "words"),
    [
        ("engine.build_engine", engine(), "keeps what `build_engine` gave it"),
        ("tokenizer.merge_pair", engine(), "remembers the tokens of the words"),
        ("tensor_parallel.cut", engine(tensor_parallel_size=2), "processes of their own"),
        ("scheduler.next_chunk", engine(tensor_parallel_size=2), "processes of their own"),
        ("cuda_graphs.bucket_sizes", engine(enforce_eager=False), "graphs that it recorded"),
        ("ops.rms_norm", engine(enforce_eager=False), "replays steps that it recorded"),
        ("scheduler.next_chunk", engine(enforce_eager=False), None),
        ("ops.rms_norm", engine(), None),
        ("tensor_parallel.cut", engine(), None),
    ],
)
def test_an_engine_that_goes_on_with_older_code_is_named(name, made, words, monkeypatch):
    """With the reason and what to run; one that runs the newest is not named."""
    monkeypatch.setattr(living, "_engines", lambda namespace: [("llm", made)])
    notes = living.notes([name], {})
    assert len(notes) == (words is not None)
    assert all(words in note and "`llm.close()`" in note for note in notes)
