"""The engine's data: what a user asks for, what one step computes, and what comes back.

Names are vLLM's, so that code and knowledge carry over. Contains no behaviour: the scheduler,
the block manager and the runner act on these classes. Not built in the course.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from minivllm.config import require_bool, require_int, require_number

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 1024  # answers to one prompt
MAX_LOGPROBS = 20  # alternatives per token
MAX_LOGIT_BIAS = 100.0  # already makes a token certain or impossible
MAX_STOP_STRINGS = 64
INVALID_TOKEN = -1  # what the runner reports where the model's logits are not finite
MAX_STOP_LENGTH = 1024  # characters: text is held back while it could become a stop string
MAX_COUNT = 2**31 - 1  # tokens: more than any vocabulary or answer has
MAX_TEMPERATURE = 1e6  # long before it all tokens are equally likely
# Outside of this range logits may become infinite in float32.
MIN_REPETITION_PENALTY = 1e-3
MAX_REPETITION_PENALTY = 1e3


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Raises ValueError for a value out of range, TypeError for an unknown keyword.
    """

    # -- which tokens are likely

    # 0: always the most probable token. Otherwise logits are divided by it: 2.0 is more random.
    temperature: float = 1.0
    # Sample from the k most probable tokens. 0 or -1: from all.
    top_k: int = 0
    # Sample from the smallest set of tokens whose probability reaches this value. 1: from all.
    top_p: float = 1.0
    # Sample from tokens whose probability is at least this share of the highest one. 0: from all.
    min_p: float = 0.0
    # Subtracted once from the logit of each token that occurs in the answer. -2 to 2; 0: off.
    presence_penalty: float = 0.0
    # Subtracted from a token's logit for each time it occurs in the answer. -2 to 2; 0: off.
    frequency_penalty: float = 0.0
    # Logits of tokens in prompt and answer are divided by it, or multiplied if they are negative.
    # Above 1 discourages, below 1 encourages repetition. 1: off.
    repetition_penalty: float = 1.0
    # Added to the logits of single tokens, by token id; -100 to 100. None: off.
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    # The random numbers depend on the seed and on the position of the token, never on the batch, so
    # the same call gives the same tokens. In another batch the logits can differ by rounding, and
    # a draw or a greedy tie can then fall the other way. None: the engine chooses a seed.
    seed: int | None = None

    # -- when the answer ends

    # Maximum number of tokens to generate. None: up to `max_model_len`.
    max_tokens: int | None = 16
    # Number of tokens to generate before a stop token or stop string can end the answer.
    min_tokens: int = 0
    # Strings that end the answer: a string, a list or None.
    stop: str | tuple[str, ...] = ()
    # Token ids that end the answer, in addition to the model's end-of-sequence tokens: a list or
    # None.
    stop_token_ids: tuple[int, ...] = ()
    # Continue after the model's end-of-sequence tokens (for benchmarks).
    ignore_eos: bool = False

    # -- what comes back

    # Number of answers to the prompt, each with its own seed.
    n: int = 1
    # Return log-probabilities of each token and of this many most probable ones. None: off.
    logprobs: int | None = None
    # Keep the stop string at the end of the text.
    include_stop_str_in_output: bool = False
    # Omit control tokens such as the end of the sequence from the text.
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            self._keep(name, plain_number(value))
        self._check_distribution()
        self._check_ends()
        require_int("n", self.n, 1, MAX_N)
        if self.logprobs is not None:
            require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        require_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        require_bool("skip_special_tokens", self.skip_special_tokens)

    def _keep(self, name: str, value: object) -> None:
        # A frozen dataclass is changed this way, here alone.
        object.__setattr__(self, name, value)

    def _check_distribution(self) -> None:
        require_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        require_int("top_k", self.top_k, -1, MAX_COUNT)
        self._keep("top_k", max(self.top_k, 0))
        require_number("top_p", self.top_p, 0, 1, open_low=True)
        require_number("min_p", self.min_p, 0, 1)
        require_number("presence_penalty", self.presence_penalty, -2, 2)
        require_number("frequency_penalty", self.frequency_penalty, -2, 2)
        limits = (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        require_number("repetition_penalty", self.repetition_penalty, *limits)
        if self.logit_bias is not None:
            self._keep("logit_bias", _checked_bias(self.logit_bias))
        if self.seed is not None:
            require_int("seed", self.seed, 0, 2**63 - 1)

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 1, MAX_COUNT)
        require_int("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_COUNT)
        require_bool("ignore_eos", self.ignore_eos)
        self._keep("stop", _checked_stop(self.stop))
        self._keep("stop_token_ids", _checked_ids(self.stop_token_ids))


# -- one form for what users may write in several, such as numpy's numbers ----------------------


def plain_number(value: Any) -> Any:
    """`value` as an int or a float if it is a number of another type, else unchanged."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def as_list(value: Any) -> Any:
    """`value` as a list of Python's own values if it is an array or a tensor, else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _checked_ids(token_ids: Any) -> tuple[int, ...]:
    token_ids = () if token_ids is None else as_list(token_ids)
    if not isinstance(token_ids, (list, tuple)):
        shown = reprlib.repr(token_ids)
        raise ValueError(f"stop_token_ids={shown} must be a list of token ids or None")
    ids = tuple(plain_number(token_id) for token_id in token_ids)
    for token_id in ids:
        require_int("stop_token_ids", token_id, 0)
    return ids


def _checked_stop(stop: object) -> tuple[str, ...]:
    """The stop strings as a tuple. Raises ValueError for one that can never or always be found."""
    if stop is None:
        return ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or len(stop) > MAX_STOP_STRINGS:
        raise ValueError(
            f"stop={reprlib.repr(stop)} must be a string or a list of at most {MAX_STOP_STRINGS}"
        )
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise ValueError(
                f"stop={reprlib.repr(text)} must be text of 1 to {MAX_STOP_LENGTH} characters"
            )
    return tuple(stop)


def _checked_bias(bias: object) -> dict[int, float]:
    """A copy of the logit bias. Raises ValueError for a wrong token id or bias."""
    if not isinstance(bias, Mapping):
        shown = reprlib.repr(bias)
        raise ValueError(f"logit_bias={shown} must map token ids to numbers, as in {{42: -5.0}}")
    checked = {plain_number(token_id): plain_number(value) for token_id, value in bias.items()}
    for token_id, value in checked.items():
        require_int("logit_bias token id", token_id, 0)
        require_number(f"logit_bias[{token_id}]", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return checked


def require_known_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError if `params` name a token id that a model of `vocab_size` tokens lacks."""
    for name, token_ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token_id in token_ids:
            require_int(f"{name} token id", token_id, 0, vocab_size - 1)


@dataclass(eq=False)
class Request:
    """One prompt in the engine, with everything that the host knows about it.

    Invariants while it runs: `block_table` covers the first `num_computed_tokens` positions;
    at most `num_tokens - 1` of them are computed before a step that samples.
    """

    request_id: str
    token_ids: list[int]  # the prompt, then the tokens of the answer that were read back
    num_prompt_tokens: int
    sampling_params: SamplingParams
    max_num_tokens: int  # prompt and answer together; the answer then ends with "length"
    stop_token_ids: frozenset[int] = frozenset()  # including those of the model
    seed: int = 0
    prompt: str | None = None

    # Progress. `num_computed_tokens` counts what has been scheduled, so it is ahead of the device
    # while steps are in flight.
    num_computed_tokens: int = 0  # positions whose keys and values are written, or will be
    num_prefill_tokens: int = 0  # num_tokens at the last admission: decoding starts behind them
    num_pending_tokens: int = 0  # tokens sampled by steps in flight, whose ids are not read yet
    num_in_flight: int = 0  # chunks that were scheduled and are not read yet
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    finish_reason: FinishReason | None = None
    error: str | None = None

    # With `logprobs`: one entry for each token of the answer that was read back.
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    # Its memory. Only the block manager changes these.
    block_table: list[int] = field(default_factory=list)
    num_published_blocks: int = 0  # leading blocks that the prefix cache already knows
    last_published: object | None = None  # the prefix cache's entry for the last of them

    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and answer, including those still in flight."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of the answer that have been read back."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens of the answer that have been read back."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether all of the prefill has been scheduled. False before admission."""
        return 0 < self.num_prefill_tokens <= self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended, for any reason."""
        return self.finish_reason is not None


@dataclass(slots=True)  # not frozen: one is made for each request in each step
class Chunk:
    """The part of one request that one step computes: positions `start` to `start + length`.

    The flags are set by the scheduler and are not derived again from the lengths.
    """

    request: Request
    start: int  # position of its first token
    length: int  # tokens
    samples: bool  # whether a new token is sampled after its last one
    is_decode: bool

    @property
    def end(self) -> int:
        """Position behind its last token: the number of tokens that its attention reads."""
        return self.start + self.length


@dataclass
class SchedulerOutput:
    """What one step computes. Chunks of decoding requests come before chunks of prompts."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)  # back in the queue, blocks freed
    failed: list[Request] = field(default_factory=list)  # can never fit; see their `error`

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass
class RequestMetrics:
    """Times of a request's events, in seconds of `time.perf_counter`."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list)  # when each token was read back

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computes a part of it."""
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between consecutive tokens; one fewer than there are tokens."""
        times = self.token_times
        return [later - earlier for earlier, later in zip(times, times[1:])]


@dataclass(frozen=True)
class Logprob:
    """The model's probability of one token, before penalties, temperature and filters."""

    logprob: float  # natural logarithm of the probability
    rank: int  # 1: the most probable; one more than the number of more probable tokens
    decoded_token: str | None = None  # its text


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    # The stop string, or the id from `stop_token_ids`, that ended it; else None.
    stop_reason: str | int | None = None
    # For each token: the token itself and the most probable ones. None: `logprobs` is off.
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None  # the sum over `token_ids`; None: off


@dataclass(frozen=True)
class RequestOutput:
    """The result for one prompt. `outputs[0].text` is the answer."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    num_preemptions: int = 0
    error: str | None = None  # why it failed; None: it did not
