"""Four engines behind one interface: token ids in, a fixed number of greedy tokens out.

    engine = ENGINES["transformers"](Setup(model_path="...", max_batch=16, max_len=256))
    answers = engine.generate([[1, 2, 3]], num_tokens=8).token_ids

Each is imported when it is made, so that a missing one is an ImportError of its own. All decode
greedily, ignore end-of-sequence tokens, keep no prefix from one call to the next and use the
same number of threads. As a script (`engines.py NAME SETUP`) it says "ready" after the first
token, for those who time a fresh process: so nothing heavy is imported up here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TokenIds = list[int]
FIRST_PROMPT = [1, 2, 3, 4]  # of a fresh process, for its first token


@dataclass(frozen=True)
class Setup:
    """What every engine is told."""

    model_path: str  # a checkpoint directory
    max_batch: int  # requests at once
    max_len: int  # tokens of prompt and answer
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 1
    gguf: str | None = None  # the same weights in llama.cpp's format
    settings: dict[str, Any] = field(default_factory=dict)  # more of ours, by name


@dataclass(frozen=True)
class Answers:
    """What came out of a call, in the order of its prompts, and when."""

    token_ids: list[TokenIds]
    token_times: list[list[float]]  # of every token: seconds of time.perf_counter


class Peer(Protocol):
    """An engine that is timed."""

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> Answers:
        """The `num_tokens` tokens that follow each prompt; all prompts are of one length."""
        ...


class Minivllm:
    """Ours."""

    def __init__(self, setup: Setup) -> None:
        from minivllm import LLM

        settings = {
            "dtype": setup.dtype,
            "device": setup.device,
            "max_num_seqs": setup.max_batch,
            "max_model_len": setup.max_len,
            "enable_prefix_caching": False,
        }
        self.llm = LLM(setup.model_path, progress=False, **{**settings, **setup.settings})

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> Answers:
        """The answers, by `LLM.generate`."""
        from minivllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return Answers(
            [output.outputs[0].token_ids for output in outputs],
            [output.metrics.token_times for output in outputs],
        )


class Transformers:
    """Hugging Face's reference, one padded batch at a time. Prompts of one length need no pad."""

    def __init__(self, setup: Setup) -> None:
        import torch
        import transformers
        from transformers.generation.streamers import BaseStreamer

        class Clock(BaseStreamer):
            """Notes when `generate` hands out the prompts, then each step's tokens."""

            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: Any) -> None:
                self.times.append(time.perf_counter())

            def end(self) -> None:
                """Nothing is left to note."""

        self.torch = torch
        self.make_clock = Clock
        model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.model_path, dtype=getattr(torch, setup.dtype)
        )
        self.model = model.to(setup.device).eval()

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> Answers:
        """The answers, by `generate`."""
        ids = self.torch.tensor(list(prompts), device=self.model.device)
        clock = self.make_clock()
        with self.torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                streamer=clock,
            )
        token_ids = output[:, ids.shape[1] :].tolist()
        return Answers(token_ids, [clock.times[1:]] * len(prompts))


class Vllm:
    """vLLM."""

    def __init__(self, setup: Setup) -> None:
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(
            model=setup.model_path,
            dtype=setup.dtype,
            max_model_len=setup.max_len,
            max_num_seqs=setup.max_batch,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> Answers:
        """The answers, step by step as `LLM.generate` computes them."""
        params = self.vllm.SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        engine = self.llm.llm_engine
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        answers = Answers([[] for _ in prompts], [[] for _ in prompts])
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = int(output.request_id)
                token_ids = list(output.outputs[0].token_ids)
                new = len(token_ids) - len(answers.token_ids[number])
                answers.token_ids[number][:] = token_ids
                answers.token_times[number].extend([time.perf_counter()] * new)
        return answers


class LlamaCpp:
    """llama.cpp, through the low-level calls of llama-cpp-python: its `Llama` class computes
    one sequence at a time, and this is to be a fair batch."""

    BATCH = 512  # tokens of one call

    def __init__(self, setup: Setup) -> None:
        import llama_cpp

        if setup.gguf is None:
            raise ImportError("llama.cpp needs the model as a GGUF file; name it with --gguf")
        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            setup.gguf.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        # The context is shared out evenly among the sequences, in portions of 256 tokens.
        params.n_ctx = setup.max_batch * -(-setup.max_len // 256) * 256
        params.n_batch = params.n_ubatch = self.BATCH
        params.n_seq_max = setup.max_batch
        params.n_threads = params.n_threads_batch = setup.num_threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise ValueError(f"llama.cpp cannot load {setup.gguf}")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> Answers:
        """The answers: all prompts, then one token of each sequence per call."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        entries = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for start in range(0, len(entries), self.BATCH):
            last |= self._decode(entries[start : start + self.BATCH])
        answers = [[last[sequence]] for sequence in range(len(prompts))]
        times = [time.perf_counter()]
        for _ in range(num_tokens - 1):
            entries = [
                (answer[-1], len(prompts[sequence]) + len(answer) - 1, sequence, True)
                for sequence, answer in enumerate(answers)
            ]
            last = self._decode(entries)
            for sequence, answer in enumerate(answers):
                answer.append(last[sequence])
            times.append(time.perf_counter())
        return Answers(answers, [times] * len(prompts))

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute (token id, position, sequence, wants logits); next token by sequence."""
        import numpy as np

        batch = self.api.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token_id, position, sequence, wants_logits) in enumerate(entries):
                batch.token[i] = token_id
                batch.pos[i] = position
                batch.logits[i] = wants_logits
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
            if (code := self.api.llama_decode(self.context, batch)) != 0:
                raise RuntimeError(f"llama_decode failed with {code}")
            found = {}
            for i, (_, _, sequence, wants_logits) in enumerate(entries):
                if wants_logits:
                    logits = self.api.llama_get_logits_ith(self.context, i)
                    row = np.ctypeslib.as_array(logits, shape=(self.vocab_size,))
                    found[sequence] = int(row.argmax())
            return found
        finally:
            self.api.llama_batch_free(batch)


ENGINES: dict[str, Any] = {
    "minivllm": Minivllm,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "vllm": Vllm,
}


def answer_one(name: str, setup: str) -> None:
    """Load an engine, answer one short prompt with one token, say so."""
    ENGINES[name](Setup(**json.loads(setup))).generate([FIRST_PROMPT], 1)
    print("\nready", flush=True)


if __name__ == "__main__":
    answer_one(*sys.argv[1:])
