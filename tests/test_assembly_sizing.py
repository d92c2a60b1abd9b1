"""Settings that depend on the machine: sizes are checked before they are allocated."""

import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import make_checkpoint

from minivllm import LLM


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("max_model_len", 10**12, "max_model_len=10+ is more than the model was trained for"),
        ("max_num_seqs", 10**9, "max_num_seqs=10+ needs .* GiB, and .* GiB are free on cpu; lower"),
        ("max_num_batched_tokens", 10**12, "max_num_batched_tokens=10+ needs .* lower it to"),
        ("num_kv_blocks", 10**10, "num_kv_blocks=10+ needs .* GiB are free on cpu; lower it to"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_allocated(path, setting, value, message):
    """By name, in bytes, with the value that would fit; the process stays as small as it was."""
    before = psutil.Process().memory_info().rss
    with pytest.raises(ValueError, match=message):
        LLM(path, attention_backend="torch", progress=False, **{setting: value})
    assert psutil.Process().memory_info().rss - before < 2**28


@pytest.mark.parametrize("name", ["mps", "meta", "toaster"])
def test_other_devices_are_refused_by_name(path, name):
    """PyTorch knows devices that the engine does not."""
    with pytest.raises(ValueError, match=f"device='{name}' must be auto, cpu, cuda"):
        LLM(path, device=name, progress=False)
