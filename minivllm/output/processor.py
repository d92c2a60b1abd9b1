"""From requests to what their users see: several answers to a prompt, text, outputs.

Does not handle the loop that makes the tokens (see `engine`) nor how they become text (see
`output.text_stream`). Not built in the course.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

from minivllm.config import known
from minivllm.engine import Engine
from minivllm.output.prompts import (
    EncodedPrompt,
    max_num_tokens,
    params_for_each,
    require_token_ids,
)
from minivllm.output.text_stream import TextStream
from minivllm.request import (
    CompletionOutput,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    require_known_tokens,
)


@dataclass
class Answer:
    """One request and its text so far."""

    request: Request
    stream: TextStream

    def read(self) -> None:
        """Take in the tokens that came since the last time."""
        request = self.request
        stream = self.stream
        if stream.stop is not None:
            return
        new = request.token_ids[request.num_prompt_tokens + stream.num_tokens :]
        ended_by_token = request.finish_reason == "stop" and bool(new)
        is_hidden = ended_by_token and not request.sampling_params.include_stop_str_in_output
        stream.push(new[:-1] if is_hidden else new)
        if is_hidden:
            stream.skip()
        if request.is_finished:
            stream.finish()

    def output(self, index: int, tokenizer: Any) -> CompletionOutput:
        """The user's view of it."""
        request = self.request
        stream = self.stream
        token_ids = request.output_token_ids[: stream.num_tokens]
        logprobs = None
        total = None
        if request.sampling_params.logprobs is not None:
            tables = request.logprobs[: len(token_ids)]
            logprobs = [_with_text(table, tokenizer) for table in tables]
            total = sum(table[token_id].logprob for table, token_id in zip(logprobs, token_ids))
        return CompletionOutput(
            index=index,
            text=stream.text,
            token_ids=token_ids,
            finish_reason="stop" if stream.stop is not None else request.finish_reason,
            stop_reason=self._stop_reason(),
            logprobs=logprobs,
            cumulative_logprob=total,
        )

    def _stop_reason(self) -> str | int | None:
        request = self.request
        stream = self.stream
        if stream.stop is not None or request.finish_reason != "stop":
            return stream.stop
        last = request.token_ids[-1]
        return last if last in request.sampling_params.stop_token_ids else None


def _with_text(table: dict[int, Logprob], tokenizer: Any) -> dict[int, Logprob]:
    return {i: replace(x, decoded_token=tokenizer.decode([i], False)) for i, x in table.items()}


@dataclass
class ParentRequest:
    """What one call asked for: `n` answers to one prompt, each a request of its own."""

    request_id: str
    prompt: str | None
    answers: list[Answer]
    num_started: int = 0  # answers whose requests are in the engine
    is_streamed: bool = False  # its output is fetched by a Stream
    output: RequestOutput | None = None  # once all answers have ended

    @property
    def may_start_rest(self) -> bool:
        """Whether the other answers can start: the prompt is computed, so that they find its
        blocks in the prefix cache instead of computing it once each."""
        first = self.answers[0].request
        return first.num_output_tokens > 0 or first.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.request.is_finished for answer in self.answers)

    def make_output(self, tokenizer: Any) -> RequestOutput:
        """The user's view of all answers so far."""
        requests = [answer.request for answer in self.answers]
        first = requests[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[a.output(index, tokenizer) for index, a in enumerate(self.answers)],
            finished=self.is_finished,
            metrics=first.metrics,
            num_cached_tokens=first.num_cached_tokens,
            num_preemptions=sum(request.num_preemptions for request in requests),
            error=next((request.error for request in requests if request.error), None),
        )


class OutputProcessor:
    """Knows which requests belong to which prompt, and makes their outputs.

    Invariant: `parents` holds the prompts that have not ended, by the ids that their users know;
    `answers` finds parent and answer of each of their requests, by the engine's ids.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parents: dict[str, ParentRequest] = {}
        self.answers: dict[str, tuple[ParentRequest, Answer]] = {}
        # Those whose text is looked at in each step; the others are read once, at their ends.
        self._watched: dict[str, tuple[ParentRequest, Answer]] = {}
        self._outputs: list[RequestOutput] = []  # complete, not taken yet
        self._numbers = itertools.count()  # of requests, for their seeds

    def add(self, prompt: EncodedPrompt, params: SamplingParams, request_id: str) -> ParentRequest:
        """Queue a prompt.

        Raises ValueError for one that is empty or too long, for a token id that the model does
        not know, for settings that are not SamplingParams, and for an id in use.
        """
        (params,) = params_for_each(params, 1)
        require_token_ids(prompt.token_ids, self.engine.vocab_size)
        if request_id in self.parents:
            raise ValueError(f"request id {request_id!r} is in use; choose another or none")
        require_known_tokens(params, self.engine.vocab_size)
        answers = [self._make_answer(request_id, i, prompt, params) for i in range(params.n)]
        parent = ParentRequest(request_id, prompt.text, answers)
        self.parents[request_id] = parent
        for answer in answers:
            self.answers[answer.request.request_id] = parent, answer
        if params.stop or params.n > 1:
            self.watch(parent)
        self._start(parent, 1)
        return parent

    def has(self, request_id: str) -> bool:
        """Whether a prompt of this id has not ended."""
        return request_id in self.parents

    def process(self, ended: list[Request]) -> None:
        """After a step of the engine, in which `ended` ended: read the texts that have grown,
        and keep the outputs that are complete."""
        running = self.engine.scheduler.running if self._watched else ()
        watched = [self._watched[r.request_id] for r in running if r.request_id in self._watched]
        touched = [*watched, *(self.answers[request.request_id] for request in ended)]
        for parent, answer in touched:
            self._read(answer)
            if parent.num_started < len(parent.answers) and parent.may_start_rest:
                self._start(parent, len(parent.answers))
        finished = {p.request_id: p for p, answer in touched if answer.request.is_finished}
        for parent in finished.values():
            if parent.is_finished:
                self._finish(parent)

    def take_outputs(self, ids: Container[str] | None = None) -> list[RequestOutput]:
        """The complete outputs that have not been taken yet; with `ids`, those of these ids."""
        taken = [o for o in self._outputs if ids is None or o.request_id in ids]
        self._outputs = [o for o in self._outputs if ids is not None and o.request_id not in ids]
        return taken

    def abort(self, request_id: str) -> bool:
        """End all answers of a prompt and forget it; whether there was one of this id."""
        parent = self.parents.pop(request_id, None)
        if parent is None:
            return False
        for answer in parent.answers[: parent.num_started]:
            self.engine.abort(answer.request.request_id)
        self._forget(parent)
        return True

    def _read(self, answer: Answer) -> None:
        answer.read()
        # The engine knows tokens only: it is told when a text has ended.
        if answer.stream.stop is not None and not answer.request.is_finished:
            self.engine.stop(answer.request.request_id)

    def _finish(self, parent: ParentRequest) -> None:
        """Forget a prompt, and keep its output for `take_outputs` unless a stream fetches it."""
        del self.parents[parent.request_id]
        self._forget(parent)
        parent.output = parent.make_output(self.engine.tokenizer)
        if not parent.is_streamed:
            self._outputs.append(parent.output)

    def watch(self, parent: ParentRequest) -> None:
        """Read the texts of a prompt after every step, not only at their ends."""
        for answer in parent.answers:
            self._watched[answer.request.request_id] = parent, answer

    def _forget(self, parent: ParentRequest) -> None:
        for answer in parent.answers:
            self.answers.pop(answer.request.request_id, None)
            self._watched.pop(answer.request.request_id, None)

    def _start(self, parent: ParentRequest, num_answers: int) -> None:
        """Hand the requests of a parent's first answers to the engine, where they are not yet."""
        for answer in parent.answers[parent.num_started : num_answers]:
            self.engine.scheduler.add_request(answer.request)
            if self.engine.trace is not None:
                self.engine.trace.arrived(answer.request)
        parent.num_started = num_answers

    def _engine_id(self, request_id: str, index: int) -> str:
        """What the engine calls an answer: unlike the user's id, unique among all answers."""
        name = f"{request_id}/{index}" if index else request_id
        while name in self.answers:
            name += "'"
        return name

    def _make_answer(
        self, request_id: str, index: int, prompt: EncodedPrompt, params: SamplingParams
    ) -> Answer:
        config = self.engine.config
        num_prompt_tokens = len(prompt.token_ids)
        max_model_len = known(config.max_model_len)
        eos = () if params.ignore_eos else self.engine.eos_token_ids
        request = Request(
            request_id=self._engine_id(request_id, index),
            token_ids=list(prompt.token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling_params=params,
            max_num_tokens=max_num_tokens(num_prompt_tokens, params.max_tokens, max_model_len),
            stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=request_seed(params.seed, index, derive_seed(config.seed, next(self._numbers))),
            prompt=prompt.text,
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )
        detokenizer = self.engine.tokenizer.detokenizer(params.skip_special_tokens)
        return Answer(request, TextStream(detokenizer, params))


class Stream:
    """One answer as it comes: an iterator over pieces of text. Made by `LLM.stream`.

    Other requests of the LLM go on with each piece that is asked for.
    """

    def __init__(
        self,
        parent: ParentRequest,
        advance: Callable[[], None],
        abort: Callable[[str], bool],
        abandon: Callable[[str], None],
    ) -> None:
        """`advance` does one step of the engine, `abort` ends a prompt by its id, and `abandon`
        does so as soon as no step is running."""
        self._parent = parent
        self._advance = advance
        self._abort = abort
        self._abandon = abandon
        self._num_shown = 0  # characters

    @property
    def output(self) -> RequestOutput | None:
        """The whole answer with its metrics; None before the end, and if it was aborted."""
        return self._parent.output

    @property
    def request_id(self) -> str:
        """Its id, for `LLM.abort`."""
        return self._parent.request_id

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece of text, as soon as there is one. After `close` there is none."""
        request = self._parent.answers[0].request
        try:
            # Asked first: another thread's step may end the request and add its last text.
            is_finished = request.is_finished
            while not (piece := self._take()) and not is_finished:
                self._advance()
                is_finished = request.is_finished
        except BaseException:
            self.close()
            raise
        if not piece:
            raise StopIteration
        return piece

    def _take(self) -> str:
        """The text that has come since the last piece."""
        piece = self._parent.answers[0].stream.text[self._num_shown :]
        self._num_shown += len(piece)
        return piece

    def close(self) -> None:
        """End the answer here, if it has not ended."""
        if self.output is None:
            self._abort(self.request_id)

    def __del__(self) -> None:
        # A loop that was left with `break` drops the last reference to its stream.
        if self.output is None:
            self._abandon(self.request_id)


def request_seed(wanted: int | None, index: int, derived: int) -> int:
    """The seed of a prompt's answer number `index`: the `wanted` one counted on, else `derived`."""
    return derived if wanted is None else (wanted + index) % 2**63


def derive_seed(engine_seed: int, number: int) -> int:
    """The seed of the engine's `number`-th request: different for each, the same in every run."""
    # Two odd multipliers keep neighbours apart; the sampler mixes the bits properly.
    return (engine_seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**63


def refusal(request_id: str, prompt: Any, error: ValueError) -> RequestOutput:
    """The output of a prompt that was refused at the door."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(0, "", [], "error")],
        finished=True,
        metrics=RequestMetrics(),
        error=str(error),
    )
