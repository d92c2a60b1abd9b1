"""A model that is exact and small, for tests of everything around the model.

Its next token is a checksum of all tokens before it, which it can only get by reading them
back through the paged cache: a wrong block, slot, position, length or `last` index changes it.
All arithmetic is on whole numbers below 2^24, which float32 holds exactly.
"""

from types import SimpleNamespace

import torch

from minivllm import ops
from minivllm.block_manager import BlockManager
from minivllm.config import EngineConfig
from minivllm.engine import Engine
from minivllm.model_runner import ModelRunner, greedy
from minivllm.prefix_cache import PrefixCache
from minivllm.request import Request, SamplingParams
from minivllm.scheduler import Scheduler

VOCAB_SIZE = 53
EOS = 0
MAX_LEN = 32


def next_token(token_ids):
    """The token that follows: each token times its place, modulo the vocabulary."""
    return sum((i + 1) * (t + 1) for i, t in enumerate(token_ids)) % VOCAB_SIZE


def expected_answer(prompt, max_tokens, max_len=MAX_LEN, stop=(EOS,)):
    """The answer by recomputing everything for every token."""
    token_ids = list(prompt)
    limit = min(len(prompt) + max_tokens, max_len)
    while len(token_ids) < limit:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in stop:
            break
    return token_ids[len(prompt) :]


class StandInModel:
    """Keys are places, values are tokens; "attention" adds up their products."""

    config = SimpleNamespace(vocab_size=VOCAB_SIZE)

    def __call__(self, input_ids, positions, attend):
        keys = (positions + 1).float()[:, None, None]
        values = (input_ids + 1).float()[:, None, None]
        return attend(0, torch.zeros_like(keys), keys, values)[:, 0]

    def logits(self, hidden):
        winners = hidden[:, 0].long() % VOCAB_SIZE
        return torch.nn.functional.one_hot(winners, VOCAB_SIZE).float()


def sum_attention(q, k_cache, v_cache, metadata, scale):
    """For each query, the sum of key times value over its request's positions up to its own."""
    out = torch.empty_like(q)
    starts, lens = metadata.query_starts.tolist(), metadata.seq_lens.tolist()
    for n, length in enumerate(lens):
        table = metadata.block_table[n : n + 1]
        products = ops.gather_blocks(k_cache, table, length)[0]
        products = products * ops.gather_blocks(v_cache, table, length)[0]
        num_queries = starts[n + 1] - starts[n]
        out[starts[n] : starts[n + 1]] = products.cumsum(0)[length - num_queries :]
        is_decode = n < metadata.num_decodes
        assert not is_decode or num_queries == 1, "decodes come first, with one token each"
        assert num_queries <= metadata.max_query_len and length <= metadata.max_seq_len
    return out


STAND_IN_OPS = SimpleNamespace(
    slot_mapping=ops.slot_mapping, store_kv=ops.store_kv, attention=sum_attention
)


def make_engine(
    num_blocks=12, block_size=4, max_num_seqs=4, budget=16, caching=True, watermark=0.1
):
    """A whole engine around the stand-in model, with its invariants checked in each step."""
    prefixes = PrefixCache(block_size) if caching else None
    memory = BlockManager(num_blocks, block_size, watermark, prefixes)
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        num_kv_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
    )
    shape = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1)
    return Engine(
        config=config,
        tokenizer=None,
        eos_token_ids=(EOS,),
        memory=memory,
        scheduler=Scheduler(memory, max_num_seqs, budget),
        runner=ModelRunner(StandInModel(), STAND_IN_OPS, greedy, shape, config),
        check_invariants=True,
    )


def make_request(request_id, prompt, max_tokens):
    """A greedy request that ends at EOS or after `max_tokens`."""
    return Request(
        request_id=str(request_id),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(temperature=0),
        max_num_tokens=min(len(prompt) + max_tokens, MAX_LEN),
        stop_token_ids=frozenset([EOS]),
    )
