"""The naive generation loop that the course measures every module against.

No KV cache, no batch, no blocks: the whole text is computed again for each token, one request
after the other, and the most probable token is taken. Correct and slow. Not built in the course;
notebook 00 shows it, and later ones compare with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm import ops
from minivllm.llm import LLM


@torch.inference_mode()
def naive_generate(llm: LLM, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` tokens that greedily follow the prompt, stop tokens ignored.

    Uses only the loaded model of `llm`. The answer to a prompt of 10 tokens with 3 new
    ones computes 10 + 11 + 12 = 33 tokens; an engine with a KV cache computes 12.
    """
    model = llm.engine.runner.model
    scale = model.config.head_dim**-0.5

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.prefill_attention(q, k, v, scale)  # keys and values are thrown away

    token_ids = list(prompt_token_ids)
    for _ in range(num_tokens):
        text = torch.tensor(token_ids, device=llm.config.device)
        positions = torch.arange(len(token_ids), device=llm.config.device)
        hidden = model(text, positions, attend)
        token_ids.append(int(model.logits(hidden[-1:]).argmax()))
    return token_ids[len(prompt_token_ids) :]


@dataclass(frozen=True)
class NaiveRun:
    """The answers of the naive loop, and the time they took."""

    token_ids: list[list[int]]  # the answer to each prompt
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prompts not counted."""
        return sum(len(answer) for answer in self.token_ids) / self.seconds


def time_naive(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> NaiveRun:
    """Answer prompts (token ids) one after the other with `naive_generate`, on the clock."""
    started = time.perf_counter()
    answers = [naive_generate(llm, prompt, num_tokens) for prompt in prompts]
    return NaiveRun(answers, time.perf_counter() - started)
