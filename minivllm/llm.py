"""The user's side of the engine: text in, text out. Not built in the course.

Names and results follow vLLM's, so that a script can swap the import. Does not handle how a step
is done (see `engine`), what a prompt may be (see `output.prompts`) or how answers become text
(see `output.processor`).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tqdm import tqdm

from minivllm.config import EngineConfig, model_name
from minivllm.engine import Engine, build_engine
from minivllm.output.processor import OutputProcessor, ParentRequest, Stream, refusal
from minivllm.output.prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    encode_chat,
    encode_prompt,
    is_conversation,
    is_one_conversation,
    is_one_prompt,
    params_for_each,
)
from minivllm.request import Request, RequestOutput, SamplingParams
from minivllm.trace import Trace


class LLM:
    """A loaded model that answers prompts.

    ```
    with LLM("smollm2-135m") as llm:
        print(llm.generate("The capital of France is")[0].outputs[0].text)
    ```
    Several threads may use one LLM: their calls wait for each other. Ctrl-C takes effect between
    two steps, so it never leaves a request half done. After a fork, only the process that made
    the LLM can use it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        trace: bool = False,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        """Load `model`: a built-in name, a checkpoint directory, or a name on the Hub.

        `settings` are the fields of `EngineConfig`. With `trace`, `llm.trace` records what
        each step does. Raises ValueError for a model that cannot be loaded or does not fit,
        TypeError for an unknown setting.
        """
        config = EngineConfig(model=model_name(model), **settings)
        engine = build_engine(config, trace=trace, progress=progress)
        requests = OutputProcessor(engine)
        engine.observe = requests.process
        # Both are None after `close`.
        self._engine: Engine | None = engine
        self._requests: OutputProcessor | None = requests
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._depth = 0  # of `_exclusive` blocks that have been entered and not left
        self._abandoned: deque[str] = deque()  # ids of streams whose loops were left
        self._process_id = os.getpid()

    # -- what it is made of ---------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The parts at work. Raises RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed; make a new one")
        if os.getpid() != self._process_id:
            # Threads and devices do not survive a fork: a step would hang or crash.
            raise RuntimeError(
                "this LLM was made before the process forked; make one in the new process, and"
                ' start processes with multiprocessing.get_context("spawn")'
            )
        return self._engine

    @property
    def requests(self) -> OutputProcessor:
        """What has been asked for and has not ended. Raises RuntimeError after `close`."""
        if self._requests is None:
            raise RuntimeError("this LLM is closed; make a new one")
        return self._requests

    @property
    def config(self) -> EngineConfig:
        """The settings in force, every one filled in."""
        return self.engine.config

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def trace(self) -> Trace | None:
        """What each step did, if the LLM was made with `trace=True`."""
        return self.engine.trace

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's `generation_config.json` recommends; used where none are given."""
        return SamplingParams(**self.engine.generation_defaults)

    # -- many prompts at once -------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, all together, and return the answers in the order of the prompts.

        A prompt is a string (control tokens of the model written in it count as such), a list
        of token ids, or `{"prompt_token_ids": [...]}`. `sampling_params` is one for all or one
        for each. One bad prompt in a list fails alone: its output has `finish_reason` "error"
        and the reason in `error`, and a warning is given; a bad prompt on its own raises
        ValueError.
        """
        if is_one_prompt(prompts):
            return self._answer_all([prompts], self._encode, sampling_params, use_tqdm, raises=True)
        return self._answer_all(list(prompts), self._encode, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: the model's chat template turns the messages into a prompt.

        `[{"role": "user", "content": "Hello"}]` is one conversation; a list of such lists are
        several. Control tokens written in a message are text. Otherwise like `generate`.
        """

        def encode(conversation: Any) -> EncodedPrompt:
            options = (add_generation_prompt, chat_template_kwargs)
            return encode_chat(conversation, self.tokenizer, *options)

        if is_one_conversation(messages):
            return self._answer_all([messages], encode, sampling_params, use_tqdm, raises=True)
        return self._answer_all(list(messages), encode, sampling_params, use_tqdm)

    def _answer_all(
        self,
        prompts: list[Any],
        encode: Callable[[Any], EncodedPrompt],
        sampling_params: Any,
        use_tqdm: bool,
        *,
        raises: bool = False,
    ) -> list[RequestOutput]:
        """`raises`: a prompt that is refused raises its error, instead of failing alone."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = params_for_each(sampling_params, len(prompts))
        ids: list[str] = []
        added: set[str] = set()
        refused: dict[str, RequestOutput] = {}
        with self._exclusive():
            try:
                for prompt, param in zip(prompts, params, strict=True):
                    request_id = self._new_id()
                    ids.append(request_id)
                    try:
                        self.requests.add(encode(prompt), param, request_id)
                        added.add(request_id)
                    except ValueError as error:
                        if raises:
                            raise
                        warnings.warn(f"{request_id} is refused: {error}", stacklevel=3)
                        refused[request_id] = refusal(request_id, prompt, error)
                answers = refused | self._run_until_done(added, len(ids), use_tqdm)
            except BaseException:
                # Ctrl-C, or a bug: what was begun here must not run on in the next call.
                for request_id in added:
                    self.abort(request_id)
                raise
        return [answers[request_id] for request_id in ids]

    def _run_until_done(
        self, ids: set[str], total: int, use_tqdm: bool
    ) -> dict[str, RequestOutput]:
        """Drive the engine until these requests have ended; their outputs by id."""
        answers: dict[str, RequestOutput] = {}
        num_tokens = 0
        started = time.perf_counter()
        num_refused = total - len(ids)
        with tqdm(total=total, desc="answers", disable=not use_tqdm, initial=num_refused) as bar:
            for _ in self._loop() if ids else ():
                for output in self.requests.take_outputs(ids):
                    answers[output.request_id] = output
                    num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
                    speed = num_tokens / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{speed:.0f} tok/s", refresh=False)
                    bar.update()
                self._end_abandoned()
                if len(answers) == len(ids):
                    break
        return answers

    # -- one request at a time ------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt, or one conversation, for the following steps; returns its id.

        Raises ValueError, and queues nothing, for an empty or too long prompt, a token id that
        the model does not know, or an id that is in use.
        """
        with self._exclusive():
            return self._add_request(prompt, sampling_params, request_id).request_id

    def stream(
        self, prompt: Prompt | Conversation, sampling_params: SamplingParams | None = None
    ) -> Stream:
        """Answer one prompt or one conversation piece by piece, as the text comes.

        ```
        for piece in llm.stream("Once upon a time"):
            print(piece, end="", flush=True)
        ```
        Joined, the pieces are the answer's text; no piece ends within a character. The `Stream`
        has the whole `output` at the end. To stop early, leave the loop or `close` it.
        Raises ValueError as `add_request` does, and for `n` above 1.
        """
        if sampling_params is not None and sampling_params.n > 1:
            n = sampling_params.n
            raise ValueError(f"n={n}: only one answer can be streamed; use generate for several")
        with self._exclusive():
            parent = self._add_request(prompt, sampling_params, None)
            parent.is_streamed = True
            self.requests.watch(parent)
        return Stream(parent, self._step, self.abort, self._abandon)

    def step(self) -> list[RequestOutput]:
        """Compute one step; return the answers that ended with it.

        Answers of `add_request` that ended while `generate` ran are included. Does nothing
        without requests.
        """
        with self._exclusive():
            self._step()
            return self.requests.take_outputs()

    def abort(self, request_id: str) -> bool:
        """End a request early and forget it. Return whether this id had an unfinished request."""
        if self._requests is None:
            return False
        with self._exclusive():
            return self.requests.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether there are unfinished requests."""
        return self.engine.has_unfinished_requests

    # -- the end --------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and the KV cache, and end the workers. Closing twice is fine."""
        if not self._is_open:
            return
        with self._exclusive():
            self._end_abandoned()
            self.engine.close()
            # Nothing holds the model any more: the next LLM can have its memory at once.
            self._engine = None
            self._requests = None

    @property
    def _is_open(self) -> bool:
        """Return whether this process can use it."""
        return self._engine is not None and os.getpid() == self._process_id

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------

    def _encode(self, prompt: Any) -> EncodedPrompt:
        return encode_prompt(prompt, self.tokenizer)

    def _add_request(
        self, prompt: Any, params: SamplingParams | None, request_id: str | None
    ) -> ParentRequest:
        is_chat = is_conversation(prompt)
        encoded = encode_chat(prompt, self.tokenizer) if is_chat else self._encode(prompt)
        request_id = request_id if request_id is not None else self._new_id()
        return self.requests.add(encoded, params or self.get_default_sampling_params(), request_id)

    def _new_id(self) -> str:
        """An id that no unfinished request has."""
        while self.requests.has(request_id := f"request-{next(self._numbers)}"):
            pass
        return request_id

    def _loop(self) -> Iterator[Request]:
        """The engine's loop: one step after the other, until no request is left."""
        engine = self.engine
        return engine.run_overlapped() if self.config.overlap else engine.run()

    def _step(self) -> None:
        """One round of that loop, if any request is left."""
        with self._exclusive():
            if not self.has_unfinished_requests():
                return
            if self.config.overlap:
                self.engine.step_overlapped()
            else:
                self.engine.step()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time, and no Ctrl-C in the middle."""
        with self._lock, self.engine.interrupts.held():
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._is_open:
                    self._end_abandoned()

    def _abandon(self, request_id: str) -> None:
        """End a prompt whose stream was dropped: at once, or after the call that is running.

        Python may drop a stream anywhere, even inside a step, where no request may end.
        """
        self._abandoned.append(request_id)
        if self._is_open and self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    with self._exclusive():
                        pass  # its end is where abandoned prompts are ended
            finally:
                self._lock.release()

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self.requests.abort(self._abandoned.popleft())
