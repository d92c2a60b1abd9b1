"""Which kernels an engine gets: by name, by itself, and the reasons why not."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined
    if find_spec("triton") is not None:  # so now: the tests take the variable away
        from minivllm.gpu import ops as gpu_ops  # noqa: F401
        from minivllm.gpu import sampling_kernels  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams, ops, sampler
from minivllm.assembly.backends import choose_backend, load_backend
from minivllm.cpu import ops as cpu_ops
from minivllm.cpu.packed import pack
from minivllm.gpu import flash_attention

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FITS_FLASH = (256, 128, torch.bfloat16)  # block size, head size, dtype
FITS_NOT = (16, 128, torch.bfloat16)
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed (pip install triton; Linux only)"
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and flash-attn are installed, and the interpreter is off, unless a test says
    otherwise."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("triton", "flash_attn"):
        if find_spec(name) is None:
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, loader=None)
            monkeypatch.setitem(sys.modules, name, module)


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """These packages are not installed."""
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in missing else ModuleSpec(name, None)
    )


# -- the choice --


def test_auto_is_the_fastest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU flash-attn where it suits the settings, then Triton, then torch; on a CPU cpu."""
    assert choose_backend("auto", GPU, *FITS_FLASH) == "flash_attn"
    assert choose_backend("auto", GPU, *FITS_NOT) == "triton"
    assert choose_backend("auto", GPU, 256, 128, torch.float32) == "triton"
    assert choose_backend("auto", CPU, *FITS_NOT) == "cpu"
    without(monkeypatch, "flash_attn")
    assert choose_backend("auto", GPU, *FITS_FLASH) == "triton"
    without(monkeypatch, "triton", "flash_attn")
    assert choose_backend("auto", GPU, *FITS_FLASH) == "torch"
    # flash-attn does attention alone: everything else is Triton's.
    without(monkeypatch, "triton")
    assert choose_backend("auto", GPU, *FITS_FLASH) == "torch"


def test_a_name_is_taken_where_it_can_be_used() -> None:
    """torch everywhere, the others on their device; nothing is changed behind one's back."""
    assert choose_backend("torch", CPU, *FITS_NOT) == "torch"
    assert choose_backend("torch", GPU, *FITS_NOT) == "torch"
    assert choose_backend("cpu", CPU, *FITS_NOT) == "cpu"
    assert choose_backend("triton", GPU, *FITS_FLASH) == "triton"
    assert choose_backend("flash_attn", GPU, *FITS_FLASH) == "flash_attn"


@pytest.mark.parametrize(
    ("name", "device", "settings", "message"),
    [
        ("cpu", GPU, FITS_NOT, "it runs on a CPU, and the device is cuda"),
        ("triton", CPU, FITS_NOT, "it runs on an NVIDIA GPU, and the device is cpu"),
        ("flash_attn", CPU, FITS_FLASH, "it runs on an NVIDIA GPU, and the device is cpu"),
        ("flash_attn", GPU, FITS_NOT, "block_size=16 must be 256"),
        ("flash_attn", GPU, (256, 512, torch.float16), "head_dim=512 must be a multiple of 8"),
        ("flash_attn", GPU, (256, 128, torch.float32), "dtype=float32 must be bfloat16"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_the_reason(
    name: str, device: torch.device, settings: tuple[int, int, torch.dtype], message: str
) -> None:
    """The message names the setting, its value, the reason and the way out."""
    with pytest.raises(ValueError, match=f"attention_backend='{name}' cannot be used") as error:
        choose_backend(name, device, *settings)
    assert message in str(error.value) and "take 'auto'" in str(error.value)


@pytest.mark.parametrize(
    ("name", "missing", "remedy"),
    [
        ("triton", "triton", "pip install triton"),
        ("flash_attn", "triton", "pip install triton"),
        ("flash_attn", "flash_attn", "pip install flash-attn"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, missing: str, remedy: str
) -> None:
    """With the command that installs it."""
    without(monkeypatch, missing)
    with pytest.raises(ValueError, match=remedy):
        choose_backend(name, GPU, *FITS_FLASH)


def test_the_interpreter_lets_triton_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name only: "auto" is never the slow one; flash-attn has no interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", CPU, 16, 128, torch.float32) == "triton"
    assert choose_backend("auto", CPU, *FITS_NOT) == "cpu"
    with pytest.raises(ValueError, match="computes bfloat16 wrongly; set dtype='float32'"):
        choose_backend("triton", CPU, *FITS_NOT)
    with pytest.raises(ValueError, match="the device is cpu"):
        choose_backend("flash_attn", CPU, *FITS_FLASH)


# -- what it stands for --


def test_torch_and_cpu_share_the_sampler() -> None:
    """One random number a row; the weights are packed for cpu, and nothing happens for torch."""
    assert load_backend("torch")[:2] == (ops, sampler.sample)
    assert load_backend("torch").prepare(model := object()) is model
    assert load_backend("cpu") == (cpu_ops, sampler.sample, pack, False)


@needs_triton
def test_the_names_of_a_gpu_share_all_but_attention() -> None:
    """Triton's kernels, and the sampler that draws with one."""
    from minivllm.gpu import ops as gpu_ops
    from minivllm.gpu.sampling_kernels import gumbel_sample

    triton, flash = load_backend("triton"), load_backend("flash_attn")
    assert triton.ops is gpu_ops and gpu_ops.attention is not flash_attention.attention
    assert flash.ops.attention is flash_attention.attention
    others = [name for name in gpu_ops.__all__ if name != "attention"]
    assert all(getattr(flash.ops, name) is getattr(gpu_ops, name) for name in others)
    for backend in (triton, flash):
        assert backend.sample.func is sampler.sample_gumbel
        assert backend.sample.keywords == {"gumbel": gumbel_sample}
        assert backend.prepare(model := object()) is model and backend.captures_prompts


# -- in the engine --


def answers(path: Path, backend: str) -> list[list[int]]:
    """Greedy tokens of a batch with a prefix hit, chunks of prompts and decodes together."""
    settings = {"device": "auto", "dtype": "float32", "num_kv_blocks": 40, "block_size": 4}
    settings |= {"max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 32}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(str(path), progress=False, attention_backend=backend, **settings) as llm:
        assert llm.config.attention_backend == backend
        outputs = llm.generate(["abcdefghij", "abcdefghijk", "xyz"], params, False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@needs_triton
@pytest.mark.long
def test_triton_gives_the_tokens_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine: on a GPU if there is one, else in the interpreter."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = make_checkpoint(tmp_path / "tiny")
    given = answers(path, "triton")
    assert given == answers(path, "torch") and len({tuple(tokens) for tokens in given}) == 3
