"""Workloads and their measurement, for `minivllm bench` and the scripts in benchmarks/.

Prompts are random token ids: speed does not depend on what they say. Does not handle results
(see `measure.results`) and other engines (see benchmarks/peers.py). Not built in the course.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.config import known
from minivllm.llm import LLM
from minivllm.measure.results import percentiles
from minivllm.request import RequestOutput, SamplingParams

TOP_TOKEN_ID = 10_000  # nano-vllm's benchmark draws from 0 to this one


# -- what is computed --------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Prompts, and the length of each answer. Every answer has exactly this length."""

    name: str
    prompts: list[list[int]]  # token ids
    num_new_tokens: list[int]  # of each answer
    temperature: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(self.num_new_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        lengths = zip(self.prompts, self.num_new_tokens, strict=True)
        return max(len(prompt) + new for prompt, new in lengths)

    @property
    def params(self) -> list[SamplingParams]:
        """The settings of each request: never stop early."""
        return [
            SamplingParams(temperature=self.temperature, max_tokens=new, ignore_eos=True)
            for new in self.num_new_tokens
        ]


def batch_workload(
    batch_size: int, prompt_tokens: int, new_tokens: int, vocab_size: int
) -> Workload:
    """Equal requests that start together, decoded greedily: the speed at one batch size.

    With `new_tokens=1` nothing is decoded: prefill alone.
    """
    name = workload_name(batch_size, prompt_tokens, new_tokens)
    # Seeded by its name: no two workloads share prompts that a prefix cache could find.
    rng = random.Random(name)
    top = min(TOP_TOKEN_ID, vocab_size - 1)
    prompts = [_random_ids(rng, prompt_tokens, top) for _ in range(batch_size)]
    return Workload(name, prompts, [new_tokens] * batch_size)


def workload_name(batch_size: int, prompt_tokens: int, new_tokens: int) -> str:
    """ "batch 16 x 128 in, 97 out", or "prefill 1 x 512 in, 1 out"."""
    kind = "prefill" if new_tokens == 1 else "batch"
    return f"{kind} {batch_size} x {prompt_tokens} in, {new_tokens} out"


def mixed_workload(
    num_requests: int,
    vocab_size: int,
    prompt_range: tuple[int, int] = (100, 1024),
    output_range: tuple[int, int] = (100, 1024),
    seed: int = 0,
) -> Workload:
    """Requests of random lengths, both ends included: more than fit at once, coming and going.

    256 requests with the other values as they are is nano-vllm's benchmark (its bench.py),
    token for token: 142,827 prompt tokens and 133,966 output tokens.
    """
    # First all prompts, then all lengths of answers: the order of the draws is part of it.
    rng = random.Random(seed)
    top = min(TOP_TOKEN_ID, vocab_size - 1)
    prompts = [_random_ids(rng, rng.randint(*prompt_range), top) for _ in range(num_requests)]
    num_new_tokens = [rng.randint(*output_range) for _ in range(num_requests)]
    name = f"mixed {num_requests} x {_range(prompt_range)} in, {_range(output_range)} out"
    return Workload(name, prompts, num_new_tokens, temperature=0.6)


def with_other_tokens(workload: Workload, shift: int, vocab_size: int) -> Workload:
    """The same lengths with other tokens, so that a repeat finds nothing in the prefix cache."""
    size = min(TOP_TOKEN_ID + 1, vocab_size)
    prompts = [[(token_id + shift) % size for token_id in ids] for ids in workload.prompts]
    return dataclasses.replace(workload, prompts=prompts)


def arrival_times(rate: float, num_requests: int, seed: int = 0) -> list[float]:
    """Seconds at which requests arrive, `rate` of them a second on average: a Poisson process.

    The gaps are exponential and independent, as with many users who do not know of each other.
    """
    rng = random.Random(seed)
    now = 0.0
    times: list[float] = []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def _random_ids(rng: random.Random, length: int, top: int) -> list[int]:
    return [rng.randint(0, top) for _ in range(length)]


def _range(low_high: tuple[int, int]) -> str:
    low, high = low_high
    return str(low) if low == high else f"{low}..{high}"


# -- one run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one run of a workload took. Times are seconds."""

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens that the prefix cache served
    num_preemptions: int
    num_recomputed_tokens: int  # computed before, and lost to a preemption
    first_token_s: list[float]  # of each request, from its arrival
    gap_s: list[float]  # between one token of a request and its next, all requests
    end_to_end_s: list[float]  # of each request, from its arrival to its last token
    prefill_tokens_per_s: float | None  # None: no stretch in which only prompts were computed
    decode_tokens_per_s: float | None  # None: no stretch in which all requests were decoding


def time_offline(llm: LLM, workload: Workload) -> Run:
    """Compute the workload, everything given at once."""
    check_fits(llm, workload)
    computed = llm.engine.num_computed_tokens
    began = time.perf_counter()
    outputs = llm.generate(workload.prompts, workload.params, use_tqdm=False)
    seconds = time.perf_counter() - began
    check_complete(outputs, workload)
    computed = llm.engine.num_computed_tokens - computed
    return make_run(outputs, [began] * len(outputs), seconds, computed)


def time_online(llm: LLM, workload: Workload, arrivals: Sequence[float]) -> Run:
    """Compute the workload with each request added at its time (seconds from now, rising).

    Latencies count from that time, and not from when the engine could take the request in: a
    request that arrives during a long step has been waiting since it came.
    """
    check_fits(llm, workload)
    computed = llm.engine.num_computed_tokens
    began = time.perf_counter()
    due = 0
    requests = list(zip(workload.prompts, workload.params, strict=True))
    outputs: dict[str, RequestOutput] = {}
    while due < len(requests) or llm.has_unfinished_requests():
        while due < len(requests) and began + arrivals[due] <= time.perf_counter():
            llm.add_request(*requests[due], request_id=f"online-{due}")
            due += 1
        if llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
        else:
            time.sleep(max(0.0, began + arrivals[due] - time.perf_counter()))
    seconds = time.perf_counter() - began
    in_order = [outputs[f"online-{number}"] for number in range(len(requests))]
    check_complete(in_order, workload)
    computed = llm.engine.num_computed_tokens - computed
    return make_run(in_order, [began + arrival for arrival in arrivals], seconds, computed)


def make_run(
    outputs: Sequence[RequestOutput], arrivals: Sequence[float], seconds: float, num_computed: int
) -> Run:
    """The figures of a run, from the times of its tokens; `arrivals` are on the same clock.
    `num_computed` tokens went through the model."""
    times = [output.metrics.token_times for output in outputs]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    prefill, decode = phase_speeds(times, num_prompt_tokens, min(arrivals))
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
    # Each token goes through the model once, but for cached ones and each answer's last.
    once = num_prompt_tokens + num_output_tokens - len(outputs) - num_cached_tokens
    return Run(
        seconds=seconds,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=num_cached_tokens,
        num_preemptions=sum(output.num_preemptions for output in outputs),
        num_recomputed_tokens=num_computed - once,
        first_token_s=[t[0] - arrival for t, arrival in zip(times, arrivals, strict=True)],
        gap_s=[gap for output in outputs for gap in output.metrics.inter_token_latencies],
        end_to_end_s=[t[-1] - arrival for t, arrival in zip(times, arrivals, strict=True)],
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
    )


def phase_speeds(
    token_times: Sequence[Sequence[float]], num_prompt_tokens: int, began: float
) -> tuple[float | None, float | None]:
    """Prompt tokens per second until every request has its first token, and output tokens per
    second from then until the first request ends; None if no such period exists.

    Two requests of 50 prompt tokens with tokens at 1, 2, 3, 4 s and at 2, 3, 4, 5 s, begun at
    0 s: 100 tokens in 2 s are 50 tok/s; from 2 to 4 s four tokens came, 2 tok/s.
    """
    all_started = max(times[0] for times in token_times)
    first_ended = min(times[-1] for times in token_times)
    only_prompts = all(len(times) == 1 for times in token_times)
    if first_ended < all_started and not only_prompts:
        return None, None
    prefill = num_prompt_tokens / (all_started - began)
    if first_ended <= all_started:
        return prefill, None
    count = sum(all_started < t <= first_ended for times in token_times for t in times)
    return prefill, count / (first_ended - all_started)


def check_fits(llm: LLM, workload: Workload) -> None:
    """Raise ValueError for a workload that is too long for the engine."""
    limit = known(llm.config.max_model_len)
    if workload.longest > limit:
        raise ValueError(
            f"the workload {workload.name!r} has requests of {workload.longest} tokens, more than"
            f" max_model_len={limit}; ask for fewer prompt or new tokens"
        )


def check_complete(outputs: Sequence[RequestOutput], workload: Workload) -> None:
    """Raise RuntimeError unless every answer is as long as asked for: else less was computed
    than is counted."""
    for output, wanted in zip(outputs, workload.num_new_tokens, strict=True):
        if (got := len(output.outputs[0].token_ids)) != wanted:
            why = output.error or output.outputs[0].finish_reason
            raise RuntimeError(
                f"{output.request_id} has {got} tokens, not the {wanted} asked for ({why});"
                " the measurement would be wrong"
            )


# -- several runs ------------------------------------------------------------------------------


def repeat_offline(
    llm: LLM, workload: Workload, repeats: int = 3, max_seconds: float = float("inf")
) -> list[Run]:
    """Compute the workload `repeats` times, but at least once.

    No further repeat begins if it would not end within `max_seconds`, as long as the longest one
    so far. Every repeat has other tokens, so the prefix cache serves none of them.
    """
    vocab_size = llm.engine.vocab_size
    runs: list[Run] = []
    began = time.perf_counter()
    while len(runs) < repeats:
        longest = max((run.seconds for run in runs), default=0.0)
        if runs and time.perf_counter() - began + longest > max_seconds:
            break
        runs.append(time_offline(llm, with_other_tokens(workload, len(runs), vocab_size)))
    return runs


def warm_up(llm: LLM, num_requests: int = 1, num_tokens: int = 8) -> None:
    """Compute something small first: what is compiled or allocated on first use is not timed."""
    vocab_size = llm.engine.vocab_size
    workload = batch_workload(num_requests, num_tokens, 2, vocab_size)
    time_offline(llm, with_other_tokens(workload, 7, vocab_size))


def summarise(workload: Workload, runs: Sequence[Run]) -> dict[str, Any]:
    """One result: medians over the runs, percentiles over all requests, and the raw times."""
    seconds = statistics.median(run.seconds for run in runs)
    return {
        "workload": workload.name,
        "num_requests": len(workload.prompts),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "num_cached_tokens": max(run.num_cached_tokens for run in runs),
        "num_preemptions": max(run.num_preemptions for run in runs),
        "num_recomputed_tokens": max(run.num_recomputed_tokens for run in runs),
        "seconds": seconds,
        "best_seconds": min(run.seconds for run in runs),
        "output_tokens_per_s": workload.num_output_tokens / seconds,
        "prompt_tokens_per_s": workload.num_prompt_tokens / seconds,
        "prefill_tokens_per_s": _median(run.prefill_tokens_per_s for run in runs),
        "decode_tokens_per_s": _median(run.decode_tokens_per_s for run in runs),
        "first_token_s": percentiles([t for run in runs for t in run.first_token_s]),
        "inter_token_s": percentiles([gap for run in runs for gap in run.gap_s]),
        "end_to_end_s": percentiles([t for run in runs for t in run.end_to_end_s]),
        "seconds_all": [run.seconds for run in runs],
        "prefill_tokens_per_s_all": [run.prefill_tokens_per_s for run in runs],
        "decode_tokens_per_s_all": [run.decode_tokens_per_s for run in runs],
        "first_token_s_all": [run.first_token_s for run in runs],
        "end_to_end_s_all": [run.end_to_end_s for run in runs],
    }


def _median(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None
