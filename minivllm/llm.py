"""The user's side of the engine: text in, text out. Given (no notebook builds it).

Names and results follow vLLM's, so that a script can swap the import. Leaves out how a step
is done (`engine`).
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from minivllm.config import EngineConfig
from minivllm.engine import Engine, build_engine
from minivllm.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from minivllm.trace import Trace

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A loaded model that answers prompts.

    ```
    with LLM("smollm2-135m") as llm:
        print(llm.generate("The capital of France is")[0].outputs[0].text)
    ```
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        trace: bool = False,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        """Load `model`, a built-in name or a checkpoint directory.

        `settings` are the fields of `EngineConfig`. With `trace`, `llm.trace` records what
        each step does. Raises ValueError for what cannot be loaded or does not fit, TypeError
        for an unknown setting.
        """
        self._engine: Engine | None = None
        config = EngineConfig(model=model, **settings)
        self._engine = build_engine(config, trace=trace, progress=progress)
        self._requests: dict[str, Request] = {}
        self._unclaimed: list[RequestOutput] = []
        self._numbers = itertools.count()

    # -- what it is made of ---------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The parts at work. Raises RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed; make a new one")
        return self._engine

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
        alone = _is_one_prompt(prompts)
        listed: list[Any] = [prompts] if alone else list(prompts)
        params = _one_for_each(sampling_params, len(listed))
        ids: list[str] = []
        refused: dict[str, RequestOutput] = {}
        try:
            for prompt, param in zip(listed, params, strict=True):
                ids.append(request_id := f"request-{next(self._numbers)}")
                try:
                    self.add_request(prompt, param, request_id)
                except ValueError as error:
                    if alone:
                        raise
                    refused[request_id] = _refusal(request_id, prompt, error)
            answers = self._run_until_done(set(ids) - set(refused), len(ids), use_tqdm)
        except BaseException:
            # Ctrl-C, or a bug: what was begun here must not run on in the next call.
            for request_id in ids:
                self.abort(request_id)
            raise
        answers |= refused
        return [answers[request_id] for request_id in ids]

    def _run_until_done(
        self, ids: set[str], total: int, use_tqdm: bool
    ) -> dict[str, RequestOutput]:
        answers: dict[str, RequestOutput] = {}
        num_tokens, started = 0, time.perf_counter()
        with tqdm(
            total=total, desc="answers", disable=not use_tqdm, initial=total - len(ids)
        ) as bar:
            while len(answers) < len(ids):
                for output in self._step():
                    if output.request_id not in ids:
                        # Somebody else's, added with `add_request`: kept for the next `step`.
                        self._unclaimed.append(output)
                        continue
                    answers[output.request_id] = output
                    num_tokens += len(output.outputs[0].token_ids)
                    speed = num_tokens / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{speed:.0f} tok/s", refresh=False)
                    bar.update()
        return answers

    # -- one request at a time ------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt for the following steps; returns its id.

        Raises ValueError, and queues nothing, for an empty or too long prompt, a token id that
        the model does not know, or an id that is in use.
        """
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; choose another or none")
        params = sampling_params if sampling_params is not None else SamplingParams()
        request = self._make_request(request_id, prompt, params)
        self._requests[request_id] = request
        self.engine.scheduler.add_request(request)
        if self.trace is not None:
            self.trace.arrived(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the answers that ended with it.

        Also those of `add_request` that ended while `generate` ran. Without requests it does
        nothing.
        """
        outputs, self._unclaimed = self._unclaimed, []
        if self.has_unfinished_requests():
            outputs += self._step()
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request early and forget it; whether there was an unfinished one of this id."""
        if self.engine.abort(request_id) is None:
            return False
        del self._requests[request_id]
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether a `step` has anything to do."""
        return self.engine.scheduler.has_unfinished_requests

    # -- the end --------------------------------------------------------------------------

    def close(self) -> None:
        """Give back model and KV cache. Closing twice is fine."""
        self._engine = None
        self._requests.clear()

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

    def _make_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        text, token_ids = self._tokenize(prompt)
        max_len = self.config.max_model_len or 0
        if len(token_ids) >= max_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; with at least one for the answer it"
                f" must be below max_model_len={max_len}. Shorten it or raise max_model_len"
            )
        limit = max_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        eos = () if params.ignore_eos else self.engine.eos_token_ids
        number = next(self._numbers)
        return Request(
            request_id=request_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling_params=params,
            max_num_tokens=min(limit, max_len),
            stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=params.seed if params.seed is not None else derive_seed(self.config.seed, number),
            prompt=text,
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """The text, if it was one, and the token ids of a prompt."""
        if isinstance(prompt, Mapping):
            prompt = _token_ids_of(prompt)
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty; give it at least one token")
            return prompt, self.tokenizer.encode(prompt, parse_special=True)
        token_ids: list[Any] = list(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty; give it at least one token")
        vocab_size = self.engine.runner.model.config.vocab_size
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{token_id!r} in the prompt is no token id; ids are whole numbers from 0 to"
                    f" {vocab_size - 1}"
                )
        return None, token_ids

    def _step(self) -> list[RequestOutput]:
        return [self._collect(request) for request in self.engine.step()]

    def _collect(self, request: Request) -> RequestOutput:
        del self._requests[request.request_id]
        return make_output(request, self.tokenizer.decode(request.output_token_ids))


def make_output(request: Request, text: str) -> RequestOutput:
    """The user's view of a request with the answer `text`."""
    answer = CompletionOutput(0, text, request.output_token_ids, request.finish_reason)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
        outputs=[answer],
        finished=request.is_finished,
        metrics=request.metrics,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        error=request.error,
    )


def derive_seed(engine_seed: int, number: int) -> int:
    """The seed of the engine's `number`-th request: different for each, the same in every run."""
    # Two odd multipliers keep neighbours apart; the sampler mixes the bits properly.
    return (engine_seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**63


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    return bool(prompts) and all(isinstance(part, int) for part in prompts)


def _one_for_each(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params if params is not None else SamplingParams()] * count
    if len(params) != count:
        raise ValueError(
            f"{count} prompts and {len(params)} sampling_params; give one for all or one for each"
        )
    return list(params)


def _token_ids_of(prompt: Mapping[str, Any]) -> Any:
    if set(prompt) != {"prompt_token_ids"}:
        raise ValueError(
            f"a prompt as a dict has one key, 'prompt_token_ids'; this one has {sorted(prompt)}"
        )
    return prompt["prompt_token_ids"]


def _refusal(request_id: str, prompt: Any, error: ValueError) -> RequestOutput:
    warnings.warn(f"{request_id} is refused: {error}", stacklevel=3)
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(0, "", [], "error")],
        finished=True,
        metrics=RequestMetrics(),
        error=str(error),
    )
