"""benchmarks/kernels.py: both twins of every case are asked the same, and bytes are counted once.

On a CPU, in Triton's interpreter, with small sizes; the times are taken by a stand-in.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton; Linux only)", allow_module_level=True)

from minivllm.measure import results as bench_results

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
kernels = importlib.import_module("kernels")
sys.path.remove(str(FOLDER))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = kernels.Shape(
    hidden=24, mlp=40, num_heads=4, num_kv_heads=2, head_dim=16, vocab=300, dtype=torch.float32,
    device=DEVICE,
)  # fmt: skip


def small_cases():
    """One of each kernel and kind."""
    for num_tokens in (1, 5, 272):
        yield from kernels.cache_cases(SHAPE, num_tokens)
    yield from kernels.layer_cases(SHAPE, 5)
    yield kernels.decode_case(SHAPE, [1, 40, 90], "3 requests")
    yield kernels.prefill_case(SHAPE, [3, 20], "2 prompts")
    yield kernels.sampling_case(SHAPE, 2)


CASES = {f"{case.kernel}, {case.size}": case for case in small_cases()}


@pytest.mark.parametrize("name", CASES)
def test_both_twins_give_the_same(name):
    """What is timed side by side does the same work on the same numbers."""
    case = CASES[name]
    arguments = case.arguments(3)
    # A kernel that writes into its arguments is compared by those.
    copies = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments)
    ours, plain = case.ours(*arguments), case.plain(*copies)
    if ours is None:
        ours, plain = arguments[2:4], copies[2:4]
    torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("rms_norm, 5 x 24", 4 * (5 * 24 + 24 + 5 * 24)),
        ("add_rms_norm, 5 x 24", 4 * (4 * 5 * 24 + 24)),
        ("silu_mul, 5 x 2 x 40", 4 * (5 * 80 + 5 * 40)),
        ("norm_rope, 5 x (4 + 2) x 16", 4 * (2 * 5 * 6 * 16 + 2 * 5 * 8 + 2 * 16)),
        ("store_kv, 5 x 2 x 2 x 16", 4 * 2 * 5 * 2 * 32 + 5 * 8),
        ("slot_mapping, 5 tokens", 5 * (8 + 8 + 4 + 8)),
        ("decode_attention, 3 requests", 4 * (2 * 131 * 32 + 2 * 3 * 64)),
        ("prefill_attention, 2 prompts", 4 * 23 * (64 + 32 + 32 + 64)),
    ],
)
def test_bytes_are_counted_once(name, num_bytes):
    """Read and written, counted here by hand."""
    assert CASES[name].num_bytes == num_bytes


def test_flops_are_those_of_the_keys_that_are_seen():
    """Two products of D a key and head; 3 + 20 tokens see 6 + 210 keys."""
    assert CASES["prefill_attention, 2 prompts"].flops == 4 * 4 * 16 * 216
    assert CASES["decode_attention, 3 requests"].flops == 4 * 4 * 16 * 131


def test_small_arguments_are_many_and_large_ones_repeat():
    """No call finds its data in the cache because the one before had the same."""
    case = CASES["rms_norm, 5 x 24"]
    sets = kernels.argument_sets(case)
    assert len(sets) == kernels.MAX_SETS and not torch.equal(sets[0][0], sets[1][0])
    large = kernels.Case("x", "", 1, kernels.MANY_BYTES // 2, lambda seed: (seed,), None, None)
    assert kernels.argument_sets(large) == [(0,), (1,)] * (kernels.MIN_CALLS // 2)


def test_a_result_says_what_every_result_says(monkeypatch, tmp_path):
    """Times come to GB/s, and the file can be read back."""
    monkeypatch.setattr(kernels, "microseconds", lambda call, arguments: 2.0)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    about = {"device": "cuda", **bench_results.provenance()}
    result = about | kernels.measure(CASES["rms_norm, 5 x 24"], compiles=True)
    assert result["gb_per_s"] == 1056 / 2e-6 / 1e9 and result["torch_microseconds"] == 2.0
    bench_results.save_results(tmp_path / "kernels.json", [result])
    assert bench_results.load_results(tmp_path / "kernels.json") == [result]
    assert kernels.cells(result) == ["rms_norm, 5 x 24", "2.00", "2.00", "2.00", "1", "-"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    """One line, no traceback."""
    monkeypatch.setattr(sys, "argv", ["benchmarks/kernels.py"])
    with pytest.raises(SystemExit):
        kernels.common.run(kernels.main)
    assert "an NVIDIA GPU is needed" in capsys.readouterr().err
