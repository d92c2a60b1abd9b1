"""The engine's nouns: what a user asks for, what one step does of it, and what comes back.

Names are vLLM's, so that code and knowledge carry over. Leaves out all behaviour: the
scheduler, the block manager and the runner act on these. Given (no notebook builds it).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from minivllm.config import require_bool, require_int, require_number

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Raises ValueError for a value out of range, TypeError for an unknown keyword.
    """

    # 0: always the most probable token. Above: logits are divided by it, so 2.0 is bolder.
    temperature: float = 1.0
    # Only the k most probable tokens. 0: all of them.
    top_k: int = 0
    # Only the most probable tokens that together have this probability. 1: all of them.
    top_p: float = 1.0
    # Only tokens at least this share as probable as the most probable one. 0: all of them.
    min_p: float = 0.0
    # Tokens to generate, at most. None: up to `max_model_len`.
    max_tokens: int | None = 16
    # More token ids that end the answer, beside the model's own end-of-sequence tokens.
    stop_token_ids: tuple[int, ...] = ()
    # Go on past the model's end-of-sequence tokens (benchmarks).
    ignore_eos: bool = False
    # Same seed, same tokens, whatever else runs at the time. None: the engine gives one.
    seed: int | None = None

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0)
        require_int("top_k", self.top_k, 0)
        require_number("top_p", self.top_p, 0, 1, open_low=True)
        require_number("min_p", self.min_p, 0, 1)
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            require_int("seed", self.seed, 0, 2**63 - 1)
        require_bool("ignore_eos", self.ignore_eos)
        # A list is welcome, a frozen tuple is kept.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            require_int("stop_token_ids", token_id, 0)


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine: the host's whole knowledge of it.

    Invariants while it runs: `block_table` covers the first `num_computed_tokens` positions;
    at most `num_tokens - 1` of them are computed before a step that samples.
    """

    request_id: str
    token_ids: list[int]  # the prompt, then every token that was read back
    num_prompt_tokens: int
    sampling_params: SamplingParams
    max_num_tokens: int  # prompt and answer together: the answer ends here with "length"
    stop_token_ids: frozenset[int] = frozenset()  # the model's own included
    seed: int = 0
    prompt: str | None = None

    # Where it stands. `num_computed_tokens` counts what has been scheduled, so it runs ahead
    # of the device by the steps in flight.
    num_computed_tokens: int = 0  # positions whose keys and values are (being) written
    num_prefill_tokens: int = 0  # positions to compute before decoding starts; set at admission
    num_pending_tokens: int = 0  # tokens sampled by steps in flight, ids not read yet
    num_in_flight: int = 0  # chunks launched and not read yet
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the last admission
    finish_reason: FinishReason | None = None
    error: str | None = None

    # Its memory. Filled and emptied by the block manager alone.
    block_table: list[int] = field(default_factory=list)
    num_published_blocks: int = 0  # leading blocks already known to the prefix cache
    last_published: object | None = None  # the prefix cache's entry of the last of them

    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics())

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, those still in flight included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The answer so far, as far as it has been read back."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether all of the prefill has been scheduled. False before admission."""
        return 0 < self.num_prefill_tokens <= self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended, for whatever reason."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class Chunk:
    """The part of one request that one step computes: positions `start` to `start + length`.

    The flags say what the scheduler decided; nobody works it out again from the lengths.
    """

    request: Request
    start: int  # position of its first token
    length: int  # tokens
    samples: bool  # whether a new token is sampled after its last one
    is_decode: bool

    @property
    def end(self) -> int:
        """Position behind its last token: so many tokens its attention can look at."""
        return self.start + self.length


@dataclass
class SchedulerOutput:
    """What one step does. Chunks of decoding requests come before chunks of prompts."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)  # back in the queue, blocks freed
    failed: list[Request] = field(default_factory=list)  # can never fit; `error` says why

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter`."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list)  # when each token was read back

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that worked on it."""
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between one token and the next; one fewer than there are tokens."""
        times = self.token_times
        return [later - earlier for earlier, later in zip(times, times[1:])]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class RequestOutput:
    """What comes back for one prompt. `outputs[0].text` is the answer."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    num_preemptions: int = 0
    error: str | None = None  # why it failed; None where it did not
