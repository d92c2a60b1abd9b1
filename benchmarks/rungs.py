"""The rungs of `ladder.py`: settings of the engine, and what is changed in it by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from minivllm import LLM, ops
from minivllm.request import SchedulerOutput
from minivllm.scheduler import Scheduler, next_chunk

NAIVE = "naive loop"
BETWEEN_PRODUCTS = ("rms_norm", "add_rms_norm", "silu_mul", "norm_rope")


@dataclass(frozen=True)
class Rung:
    """The engine with these settings, and what is changed by hand before it is timed."""

    name: str
    settings: dict[str, Any]
    prepare: Callable[[LLM], None] = lambda llm: None
    has_timeline: bool = False


def rungs(device_type: str) -> list[Rung]:
    """Those that exist on a kind of device, lowest first; without the naive loop."""
    is_gpu = device_type == "cuda"
    plain = {"attention_backend": "torch", "enforce_eager": True, "overlap": False}
    fast = plain | {"attention_backend": "triton" if is_gpu else "cpu"}
    graphs = (fast if is_gpu else plain) | {"enforce_eager": False}
    return [
        Rung("torch operations", plain, has_timeline=not is_gpu),
        Rung("torch.compile", plain, compile_operations),
        Rung("Triton kernels" if is_gpu else "numba kernels", fast, has_timeline=is_gpu),
        Rung("graph: forward", graphs, sample_outside),
        Rung("graph: all", graphs, has_timeline=True),
        Rung("overlap", graphs | {"overlap": True}, has_timeline=is_gpu),
    ]


def compile_operations(llm: LLM) -> None:
    """Let Inductor write the kernels between the matrix products."""
    compiled = {name: torch.compile(getattr(ops, name), dynamic=True) for name in BETWEEN_PRODUCTS}
    for module in llm.engine.runner.model.modules():
        if hasattr(module, "ops"):
            module.ops = SimpleNamespace(**{**vars(module.ops), **compiled})


def sample_outside(llm: LLM) -> None:
    """Replay the forward pass alone, then launch the sampler's operations one by one."""
    runner = llm.engine.runner
    runner.forward_and_sample = lambda plan: runner.sample_tokens(
        plan, runner.graphs.run(runner.forward, plan)
    )


class PromptsFirst(Scheduler):
    """A step computes prompts or decodes, never both, and prompts go first: as nano-vllm does."""

    def schedule(self) -> SchedulerOutput:
        """Prompts, begun ones first; decodes if there are none."""
        output = SchedulerOutput()
        for request in [r for r in self.running if not r.is_decoding]:
            budget = self.max_num_batched_tokens - output.num_tokens
            if budget > 0:
                self._take(next_chunk(request, budget), output)
        self.schedule_waiting(output)
        return output if output.chunks or output.failed else super().schedule()


def prompts_first(llm: LLM) -> None:
    """Put the other policy into the engine, with the same memory."""
    old = llm.engine.scheduler
    llm.engine.scheduler = PromptsFirst(old.memory, old.max_num_seqs, old.max_num_batched_tokens)


POLICIES: dict[str, Callable[[LLM], None]] = {
    "prompts alone": prompts_first,
    "prompts in chunks": lambda llm: None,
}


def names_of(device_type: str) -> list[str]:
    """Everything that can be measured on a kind of device, in order."""
    return [NAIVE, *(rung.name for rung in rungs(device_type)), *POLICIES]
