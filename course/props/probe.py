"""What lesson 05 brings to look into a model: its stages, its attention, bugs to put into it, the
machine's two speeds, and weights in fewer bits."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from course.files import HOME
from minivllm import ops
from minivllm.checkpoint.weights import load_model, read_config


def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one request without a cache, as in the naive loop of chapter 00."""
    return ops.prefill_attention(q, k, v, q.shape[-1] ** -0.5)


def tiny_llama() -> tuple[Any, dict[str, Any]]:
    """Return a Llama of 1,400 weights, and what `transformers` computed with it."""
    stored = json.loads((HOME / "tests/data/tiny_llama.json").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        weights = {name: torch.tensor(values) for name, values in stored["weights"].items()}
        save_file(weights, f"{folder}/model.safetensors")
        Path(folder, "config.json").write_text(json.dumps(stored["config"]))
        net = load_model(folder, read_config(folder), torch.float32, "cpu", 32, progress=False)
    return net, stored


def recorded_answer() -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and of what `transformers` answers with SmolLM2-135M."""
    record = json.loads((HOME / "tests/data/smollm2_greedy.json").read_text("utf-8"))[1]
    return record["prompt"], record["answer"][:24]


@torch.inference_mode()
def stages(
    net: Any, input_ids: Sequence[int], parts: Mapping[str, Any], attend: Any = attend
) -> dict[str, Tensor]:
    """Run a model; return the results of some of its modules by name, and the logits."""
    found: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_hook(lambda part, args, out, name=name: found.update({name: out}))
        for name, part in parts.items()
    ]
    ids = torch.tensor(input_ids)
    found["logits"] = net.logits(net(ids, torch.arange(len(ids)), attend))
    for hook in hooks:
        hook.remove()
    return found


def attention_weights(net: Any, input_ids: Sequence[int]) -> Tensor:
    """Return how much each token looks at each: `[layers, heads, tokens, tokens]`."""
    seen: dict[int, Tensor] = {}

    def watching(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("lhd,shd->hls", q, shared) * q.shape[-1] ** -0.5
        later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        seen[layer_index] = scores.masked_fill(later, -torch.inf).softmax(-1)
        return attend(layer_index, q, k, v)

    stages(net, input_ids, {}, watching)
    return torch.stack([seen[layer] for layer in sorted(seen)])


def divergence(right: Tensor, logits: Tensor) -> float:
    """Return the KL divergence of two `[T, V]`, in nats, the mean over tokens; 0 for equal ones."""
    true, found = right.log_softmax(-1), logits.log_softmax(-1)
    return (true.exp() * (true - found)).sum(-1).mean().item()


# -- bugs --------------------------------------------------------------------------------------


def _eps_outside(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def _add_eps_outside(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x + y, _eps_outside(x + y, weight, eps)


def _turn_neighbours(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    # 0 2 4 ... 1 3 5 ...: now neighbours are in the two halves.
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin)


def _swapped(gate_up: Tensor) -> Tensor:
    return ops.silu_mul(gate_up.roll(gate_up.shape[-1] // 2, -1))


def modulo(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend`, with query head h reading KV head h % K."""
    group = q.shape[1] // k.shape[1]
    return attend(layer_index, q, k.repeat(1, group, 1), v.repeat(1, group, 1))


# Operations with a bug in each, by its name.
BUGS: dict[str, dict[str, Callable[..., Any]]] = {
    "eps outside the root": {"rms_norm": _eps_outside, "add_rms_norm": _add_eps_outside},
    "neighbours paired": {"norm_rope": _turn_neighbours},
    "nothing rotates": {"norm_rope": lambda q, k, *rest: (q, k)},
    "gate and up swapped": {"silu_mul": _swapped},
}


@contextmanager
def with_ops(net: Any, changes: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace some of a model's operations for a while."""
    parts = [part for part in net.modules() if hasattr(part, "ops")]
    before = [part.ops for part in parts]
    changed = SimpleNamespace(**{**vars(ops), **changes})
    for part in parts:
        part.ops = changed
    try:
        yield
    finally:
        for part, was in zip(parts, before):
            part.ops = was


# -- speed -------------------------------------------------------------------------------------


def best(function: Callable[..., Any], *arguments: Any, repeats: int = 5) -> float:
    """Return the seconds of the shortest of some calls."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - began)
    return min(times)


@torch.inference_mode()
def time_step(net: Any, num_tokens: int) -> tuple[float, float]:
    """Time one step of a float32 model; return its seconds and its operations for each byte of
    weights. Only one token gets logits."""

    def step() -> None:
        places = torch.arange(num_tokens)
        net.logits(net(places % net.config.vocab_size, places, attend)[-1:])

    num_weights = sum(weight.numel() for weight in net.parameters())
    head = net.model.embed_tokens.weight.numel()
    operations = 2 * (num_tokens * (num_weights - head) + head)
    return best(step, repeats=2), operations / (4 * num_weights)


# -- fewer bits --------------------------------------------------------------------------------


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """Return a weight `[m, n]` rounded to whole multiples of a scale, of `bits` bits with their
    sign; `group` numbers of a row share a scale."""
    most = 2 ** (bits - 1) - 1
    parts = weight.unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min_(1e-12) / most
    return (parts / scale).round_().mul_(scale).flatten(-2)


@torch.inference_mode()
def judge_bits(
    net: Any, input_ids: Sequence[int], base: Tensor, plan: Callable[[str], tuple[int, int]]
) -> dict[str, float]:
    """Round the weights of the layers as `plan(name) -> (bits, group)` says; return the megabytes
    that a token reads of them, scales of 16 bits included, and what is lost. The model is as it
    was afterwards."""
    kept, num_bytes = {}, 0.0
    for name, weight in net.model.layers.named_parameters():
        if weight.dim() == 2:
            bits, group = plan(name)
            kept[weight] = weight.data
            weight.data = rounded(weight.data, bits, group)
            num_bytes += weight.numel() * (bits / 8 + 2 / group)
    logits = stages(net, input_ids, {})["logits"]
    for weight, data in kept.items():
        weight.data = data
    return {"MB a token": num_bytes / 1e6, "KL (1e-3 nats)": 1e3 * divergence(base, logits)}
