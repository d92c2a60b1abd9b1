"""How the rows of one step want their next token chosen, as tensors; and which requests ask for
what. Given (no notebook builds it): `rows` fills these, `logits_processors` and `sampler` read
them.

Tensor letters: N rows that sample in a step, M of them that ask for something, E entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from minivllm.request import Request, SamplingParams

BiasEntry = tuple[int, float, float]  # token id, value, first position without it


@dataclass(frozen=True)
class SamplingRows:
    """The settings of the rows that sample in one step; the runner fills it from its rows.

    The flags, and what is None, are known on the host and only save work: a flag that is True
    without need changes no token. `settings[rows]` takes a slice or row numbers [M] int64.
    """

    temperature: Tensor  # [N] float32; 0: greedy, the rest of the row is then ignored
    top_k: Tensor  # [N] int64, tokens; 0: off
    top_p: Tensor  # [N] float64, in (0, 1]; 1: off
    min_p: Tensor  # [N] float32, in [0, 1]; 0: off
    seed: Tensor  # [N] int64
    any_random: bool  # some temperature is above 0
    any_filter: bool  # some row has top_k, top_p or min_p on
    biases: Biases | None = None  # None: no row asks
    penalties: Penalties | None = None  # None: no row asks

    def __getitem__(self, rows: slice | Tensor) -> SamplingRows:
        """How to choose the token of some rows. Without biases and penalties: those are applied
        to the logits of the whole step, before its rows are taken apart."""
        return replace(
            self,
            biases=None,
            penalties=None,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
        )


@dataclass(frozen=True)
class Biases:
    """Numbers to add to single logits of one step: E entries, of any of its N rows."""

    rows: Tensor  # [E] int64, which of the N rows
    token_ids: Tensor  # [E] int64
    values: Tensor  # [E] float32, may be -inf


@dataclass(frozen=True)
class Penalties:
    """The penalties of one step and what they look at, for the M of its N rows that ask."""

    rows: Tensor  # [M] int64, which of the N rows
    token_ids: Tensor  # [M, L] int32, prompt and answer from position 0; undefined behind them
    num_prompt_tokens: Tensor  # [M] int64
    repetition: Tensor  # [M] float32, above 0; 1: off
    presence: Tensor  # [M] float32; 0: off
    frequency: Tensor  # [M] float32; 0: off


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the chosen token of M rows and of the K most probable ones."""

    token_ids: Tensor  # [M, 1 + K] int64, the chosen one first
    logprobs: Tensor  # [M, 1 + K] float32, natural logarithms
    ranks: Tensor  # [M, 1 + K] int64, 1: no token is more probable


def has_filters(params: SamplingParams) -> bool:
    """Whether top_k, top_p or min_p is on."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens so far change the logits of the next one."""
    others = params.presence_penalty != 0 or params.frequency_penalty != 0
    return params.repetition_penalty != 1 or others


def bias_entries(request: Request) -> list[BiasEntry]:
    """What to add to which logits, and until which position.

    A prompt of 4, logit_bias {7: 1.5}, min_tokens 3 and stop token 2 give (7, 1.5, inf) and
    (2, -inf, 7): the tokens at positions 4, 5 and 6 cannot be the stop token.
    """
    params = request.sampling_params
    biases = (params.logit_bias or {}).items()
    entries: list[BiasEntry] = [(token_id, value, math.inf) for token_id, value in biases]
    if params.min_tokens > 0:
        end = request.num_prompt_tokens + params.min_tokens
        entries += [(token_id, -math.inf, end) for token_id in sorted(request.stop_token_ids)]
    return entries
