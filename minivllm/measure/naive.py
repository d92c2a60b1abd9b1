"""The naive loop of notebook 00 with a real model, on the clock.

No KV cache, no batch, no blocks: the loop recomputes the whole text for each token and answers one
request after the other. Later notebooks compare the engine with it. Not built in the course.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm import naive, ops
from minivllm.llm import LLM


def whole_text_model(llm: LLM) -> naive.Model:
    """Return the loaded model of `llm` as a function of a whole text, for the naive loop.

    The function takes the token ids of a text and returns the logits of the next token, a list
    with one score for each token id. It keeps nothing from one call to the next.
    """
    model = llm.engine.runner.model
    scale = model.config.head_dim**-0.5

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.prefill_attention(q, k, v, scale)  # keys and values are thrown away

    @torch.inference_mode()
    def logits_of(token_ids: Sequence[int]) -> list[float]:
        text = torch.tensor(token_ids, device=llm.config.device)
        positions = torch.arange(len(token_ids), device=llm.config.device)
        hidden = model(text, positions, attend)
        logits: list[float] = model.logits(hidden[-1:])[0].tolist()
        return logits

    return logits_of


def naive_generate(llm: LLM, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return the `num_tokens` tokens that follow the prompt greedily, ignoring stop tokens.

    Uses only the loaded model of `llm`. For a prompt of 10 tokens and 3 new ones, the model
    computes 10 + 11 + 12 = 33 tokens; an engine with a KV cache computes 12.
    """
    return naive.generate_tokens(whole_text_model(llm), prompt_token_ids, num_tokens)


@dataclass(frozen=True)
class NaiveRun:
    """The answers of the naive loop, and the time they took."""

    token_ids: list[list[int]]  # the answer to each prompt
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second; prompt tokens don't count."""
        return sum(len(answer) for answer in self.token_ids) / self.seconds


def time_naive(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> NaiveRun:
    """Answer prompts (token ids) one after the other with `naive_generate`, and time it."""
    started = time.perf_counter()
    answers = [naive_generate(llm, prompt, num_tokens) for prompt in prompts]
    return NaiveRun(answers, time.perf_counter() - started)
