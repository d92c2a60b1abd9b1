"""What lesson 04 brings to its experiments: a readable tokenizer, requests, and prompts that come
one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from minivllm.block_manager import BlockManager, BlockPool
from minivllm.engine import Engine
from minivllm.model_runner import Pending
from minivllm.prefix_cache import CachedBlock, PrefixCache
from minivllm.request import Chunk, Request, SamplingParams
from minivllm.scheduler import Scheduler

SYSTEM = """You are Pia, the assistant on the night train from Berlin to Rome.
The train leaves Berlin at 19:04 and Verona at 05:40. It reaches Rome at 09:15. Breakfast is
served from 07:00 in car 12. Dogs are welcome in car 20. If a passenger asks for something that
you do not know, name the conductor, who is in car 14 all night. Answer in one short sentence."""
QUESTIONS = (
    "When are we in Rome?",
    "Where is breakfast?",
    "May my dog sleep here?",
    "Who is the conductor?",
)
FACT = (
    "France is a country in the west of Europe. Its capital is a very old city on the river"
    " Seine, with a famous tower of iron that every visitor knows. This city is called"
)
TALK = ("Hello, I am Ada!", "Is there tea on board?", "And where do I find it?")

_vocabulary: dict[str, int] = {}


def ids(text: str) -> list[int]:
    """Return one token per word, numbered in the order in which words first appear."""
    return [_vocabulary.setdefault(word, len(_vocabulary)) for word in text.split()]


def words(token_ids: Iterable[int]) -> str:
    """Return the text of `ids`."""
    return " ".join(list(_vocabulary)[token_id] for token_id in token_ids)


def make_request(name: str, token_ids: Iterable[int], num_new: int = 1) -> Request:
    """Return a request with this prompt that ends after `num_new` new tokens."""
    tokens = list(token_ids)
    return Request(
        request_id=name,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling_params=SamplingParams(),
        max_num_tokens=len(tokens) + num_new,
    )


def chat(*turns: str) -> list[dict[str, str]]:
    """Return a conversation with Pia; `turns` are the user's and hers, in turn."""
    roles = ["user", "assistant"] * len(turns)
    said = [{"role": role, "content": text} for role, text in zip(roles, turns)]
    return [{"role": "system", "content": SYSTEM}, *said]


def talk(llm: Any, params: SamplingParams) -> list[Any]:
    """Hold the conversation TALK with a model; return its outputs, turn by turn."""
    said: list[str] = []
    outputs = []
    for question in TALK:
        outputs.append(llm.chat(chat(*said, question), params, use_tqdm=False)[0])
        said += [question, outputs[-1].outputs[0].text]
    return outputs


class NoModel:
    """Replaces the model runner: computes nothing and always samples the token 1."""

    def launch(self, chunks: Sequence[Chunk]) -> Pending:
        """Return a step that has finished."""
        return Pending(torch.ones(sum(chunk.samples for chunk in chunks), dtype=torch.int64))

    def release(self, request: Request) -> None:
        """Do nothing: there are no rows."""


def at_once(prompts: Sequence[Sequence[int]], budget: int = 256) -> dict[str, tuple[int, int]]:
    """Answer all prompts at once with the real engine and no model; return for each of them how
    many tokens were found and how many were computed."""
    memory = BlockManager(64, 16, prefixes=PrefixCache(16))
    scheduler = Scheduler(memory, max_num_seqs=16, max_num_batched_tokens=budget)
    runner: Any = NoModel()
    engine = Engine(None, None, (), memory, scheduler, runner, check_invariants=True)  # type: ignore[arg-type]
    requests = [make_request(str(i), prompt, num_new=8) for i, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add_request(request)
    for _ in engine.run():
        pass
    found = [request.num_cached_tokens for request in requests]
    return {f"twin {i + 1}": (n, len(prompts[i]) - n) for i, n in enumerate(found)}


def one_by_one(
    prompts: Sequence[Sequence[int]],
    num_blocks: int = 200,
    order: Callable[[list[int]], Iterable[int]] = reversed,
    kind: type[BlockPool] = BlockPool,
) -> float:
    """Compute prompts one after the other; return the share of their tokens that was found.

    `order` is the order in which a request returns its blocks, `kind` the class of the pool.
    """
    manager = BlockManager(num_blocks, 16, prefixes=PrefixCache(16))
    manager.pool = kind(num_blocks, manager.prefixes)
    found = 0
    for prompt in prompts:
        request = make_request("r", prompt)
        found += manager.reuse_prefix(request)
        manager.allocate(request, len(prompt))
        manager.publish(request, len(prompt))
        manager.pool.free(order(request.block_table))
    return found / sum(map(len, prompts))


def conversations() -> Iterator[list[int]]:
    """Yield the prompts of eight users who take turns, six each: 64 shared tokens, then 32 more
    tokens with each turn."""
    for turn in range(1, 7):
        for user in range(1, 9):
            yield [*range(64), *range(1000 * user, 1000 * user + 32 * turn)]


def chain(cache: PrefixCache, blocks: Iterable[Sequence[int]], first_block: int = 0) -> CachedBlock:
    """Insert the blocks of a prompt behind each other, as numbers from `first_block` on; return
    the last node."""
    node: Any = None
    for block_id, tokens in enumerate(blocks, start=first_block):
        node = cache.insert(node, tokens, block_id)
    last: CachedBlock = node
    return last
