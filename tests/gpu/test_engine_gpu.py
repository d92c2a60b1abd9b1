"""The engine on a GPU: every backend, with and without graphs and overlap, gives the tokens of the
CPU; graphs cover every batch; memory comes back."""

import gc
import itertools
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported: for other tests

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_checkpoint import VOCAB_SIZE, make_checkpoint

from minivllm import LLM, SamplingParams, cuda_graphs
from minivllm.assembly import backends, parts
from minivllm.gpu.prompt_buckets import PromptBuckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
PROMPTS = ["abcdefgh", "abcdefgh", "abcdefghij", "xyz", "the end", "q"]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny model."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def greedy(max_tokens=20):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def run(path, prompts, params, num_rounds=1, device=DEVICE, **settings):
    """The answers to some rounds over all prompts, in float32."""
    defaults = {"dtype": "float32", "num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 4}
    with LLM(str(path), device=device, progress=False, **(defaults | settings)) as llm:
        llm.engine.check_invariants = True
        return [o for _ in range(num_rounds) for o in llm.generate(prompts, params, False)]


def tokens(outputs):
    """The token ids of each output's first answer."""
    return [list(output.outputs[0].token_ids) for output in outputs]


@cache
def tokens_of_the_cpu(path):
    """One prompt at a time, by plain torch."""
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False, "attention_backend": "torch"}
    return tokens(run(path, PROMPTS, greedy(), device="cpu", **alone))


# -- the same tokens --


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 4},
        {"num_kv_blocks": 9, "max_model_len": 36},
        {"enable_prefix_caching": False},
    ],
    ids=["batched, prefixes found", "in chunks", "preempted", "no prefix cache"],
)
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_tokens_equal_those_of_the_cpu(
    checkpoint, backend, enforce_eager, overlap, settings
):
    """Two rounds over the prompts, each of them twice the batch."""
    how = {"attention_backend": backend, "enforce_eager": enforce_eager, "overlap": overlap}
    outputs = run(checkpoint, PROMPTS, greedy(), 2, **how, **settings)
    assert tokens(outputs) == 2 * tokens_of_the_cpu(checkpoint)
    is_tight = "max_model_len" in settings
    assert any(o.num_preemptions for o in outputs) == is_tight
    if not is_tight:  # a full pool keeps no prefixes for a first admission
        finds_prefixes = settings.get("enable_prefix_caching", True)
        assert any(o.num_cached_tokens for o in outputs[6:]) == finds_prefixes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [16, 256])
def test_larger_blocks_give_the_same_tokens(checkpoint, block_size, backend):
    """256 is the largest; a request then has one block."""
    settings = {"block_size": block_size, "num_kv_blocks": 8, "attention_backend": backend}
    assert tokens(run(checkpoint, PROMPTS, greedy(), **settings)) == tokens_of_the_cpu(checkpoint)


# -- sampling --

ALL_WAYS = [
    {"enforce_eager": eager, "overlap": overlap}
    for eager, overlap in itertools.product([False, True], [False, True])
]


def assert_all_ways_agree(path, params, backend="auto"):
    """Graphs or not, overlapped or not; returns the outputs."""
    outputs = [run(path, PROMPTS, params, attention_backend=backend, **way) for way in ALL_WAYS]
    first = tokens(outputs[0])
    assert all(tokens(others) == first for others in outputs)
    return outputs[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sampled_run_is_the_same_overlapped_and_with_graphs(checkpoint, backend):
    """A seed of its own for each prompt; equal prompts with different seeds differ."""
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    given = tokens(assert_all_ways_agree(checkpoint, params, backend))
    assert given[0] != given[1], "the same prompt with another seed"
    assert tokens(run(checkpoint, PROMPTS[3:4], params[3], attention_backend=backend)) == [given[3]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"logit_bias": {65: 5.0}},
        {"logprobs": 2},
    ],
    ids=str,
)
def test_rows_that_ask_for_more_get_it_with_graphs(checkpoint, backend, asked):
    """Next to greedy and random rows that do not ask, which stay as they would be alone."""
    plain = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
    params = [
        SamplingParams(**plain, **({"temperature": 1.0} | asked)),
        SamplingParams(**plain, temperature=0.0),
        SamplingParams(**plain, temperature=1.0),
    ] * 2
    outputs = assert_all_ways_agree(checkpoint, params, backend)
    alone = run(checkpoint, PROMPTS[1:3], params[1:3], attention_backend=backend)
    assert tokens(outputs)[1:3] == tokens(alone)
    if "logprobs" in asked:
        assert all(len(entry) in (2, 3) for entry in outputs[0].outputs[0].logprobs)
        assert outputs[1].outputs[0].logprobs is None


def test_a_seed_repeats_its_tokens(checkpoint):
    """Filters and all."""
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, max_tokens=12, seed=3)
    first, second = (tokens(run(checkpoint, ["abc"], params)) for _ in range(2))
    assert first == second and len(first[0]) > 1


# -- the borders of graphs --


@pytest.mark.parametrize("max_num_seqs", [5, 97, 98, 99, 100])
def test_graphs_cover_max_num_seqs(checkpoint, max_num_seqs):
    """A full batch, and every smaller one, since the answers are of different lengths."""
    prompts = [[i % 250, i // 250 + 1, 7] for i in range(max_num_seqs)]
    params = [greedy(1 + i % 13) for i in range(max_num_seqs)]
    size = {"max_num_seqs": max_num_seqs, "num_kv_blocks": 4 * max_num_seqs}
    expected = tokens(
        run(checkpoint, prompts, params, device="cpu", attention_backend="torch", **size)
    )
    assert tokens(run(checkpoint, prompts, params, enforce_eager=False, **size)) == expected


@pytest.mark.parametrize("max_model_len", [21, 24, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_that_reaches_max_model_len_ends_with_length(checkpoint, backend, max_model_len):
    """The captured block table is wide enough to the last position, in a block or at its end."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    settings = {"max_model_len": max_model_len, "num_kv_blocks": 100}
    expected = run(checkpoint, PROMPTS, params, device="cpu", attention_backend="torch", **settings)
    given = run(checkpoint, PROMPTS, params, enforce_eager=False, attention_backend=backend,
                **settings)  # fmt: skip
    assert tokens(given) == tokens(expected)
    for prompt, output in zip(PROMPTS, given, strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert len(prompt) + len(output.outputs[0].token_ids) == max_model_len


@needs_triton
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_nothing_is_compiled_once_the_engine_has_run(checkpoint, monkeypatch, enforce_eager):
    """After a first run, eager ones over every batch size: then others, of other lengths, with
    every batch size from 64 down to 1, prompts with decodes, and requests that come back."""
    import triton

    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **about: compiled.append(about["repr"]),
    )
    # Settings of no other test, or all would be compiled already.
    settings = {"dtype": "float16", "block_size": 128 if enforce_eager else 64}
    settings |= {"max_num_seqs": 64, "max_num_batched_tokens": 96, "num_kv_blocks": 200}
    settings |= {"attention_backend": "triton", "enforce_eager": enforce_eager}
    with LLM(str(checkpoint), device=DEVICE, progress=False, **settings) as llm:

        def staggered(start):
            prompts = [[start, i, *range(1 + i % 9)] for i in range(64)]
            llm.generate(prompts, [greedy(i + 1) for i in range(64)], False)

        staggered(1)
        assert compiled, "the hook has heard of nothing: this test cannot fail"
        compiled.clear()
        staggered(2)
        staggered(2)
        llm.generate([[3] * 100, [4], [5] * 33], greedy(20), False)
        assert compiled == []


# -- memory, and several engines in a process --


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_close_gives_the_memory_back(checkpoint, enforce_eager):
    """Weights, rows, KV cache and graphs: all of it, without a restart of the process."""

    def opened():
        llm = LLM(str(checkpoint), device=DEVICE, num_kv_blocks=4000, progress=False,
                  enforce_eager=enforce_eager)  # fmt: skip
        llm.generate(PROMPTS, greedy(), False)
        return llm

    opened().close()  # libraries take memory of their own at first, and keep it
    gc.collect()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    llm = opened()
    assert torch.cuda.memory_allocated() > before + 2**20
    with cuda_graphs.no_garbage_collection():
        llm.close()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == before, "it waits for a search for garbage"
    assert torch.cuda.memory_reserved() <= reserved + 2**21, "one segment may lie otherwise"


def test_engines_one_after_the_other_and_at_once_do_not_mix(checkpoint, tmp_path):
    """Two models with graphs in one process, their steps in turns."""
    other = make_checkpoint(tmp_path / "other", hidden_size=64, num_attention_heads=2)
    expected = [tokens_of_the_cpu(path) for path in (checkpoint, other)]
    assert expected[0] != expected[1]
    for path, answers in zip((checkpoint, other, checkpoint), (*expected, expected[0])):
        assert tokens(run(path, PROMPTS, greedy(), enforce_eager=False)) == answers
    settings = {"dtype": "float32", "num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 4}
    settings |= {"device": DEVICE, "progress": False, "enforce_eager": False}
    with LLM(str(checkpoint), **settings) as one, LLM(str(other), **settings) as two:
        for llm in (one, two):
            for n, prompt in enumerate(PROMPTS):
                llm.add_request(prompt, greedy(), request_id=str(n))
        ended = [{}, {}]
        while any(len(found) < len(PROMPTS) for found in ended):
            for llm, found in zip((one, two), ended):
                found |= {o.request_id: o for o in llm.step() if o.finished}
    for found, answers in zip(ended, expected):
        assert tokens([found[str(n)] for n in range(len(PROMPTS))]) == answers


# -- numbers: transformers, types --

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def make_oracle(family, path):
    """A random model of transformers, saved in `path` with a tokenizer next to it."""
    transformers = pytest.importorskip("transformers", reason="the oracle of this test")
    make_checkpoint(path)
    torch.manual_seed(0)
    kind = transformers.AutoConfig.for_model(family.lower(), **SIZES)
    oracle = getattr(transformers, f"{family}ForCausalLM")(kind).eval()
    for name, parameter in oracle.named_parameters():
        # Products of unit-scale numbers stay at unit scale.
        parameter.data.normal_(mean=1.0 if "norm" in name else 0.0, std=0.1)
    oracle.save_pretrained(path)
    return oracle.to(DEVICE)


def forced_logits(path, texts, monkeypatch, **settings):
    """The engine's logits after each of `texts[n][:p]`, p >= 20, as its sampler sees them:
    `[texts, positions, V]`. The sampler chooses what the text says, whatever the logits are."""
    longest = max(map(len, texts))
    script = torch.zeros(len(texts) + 1, longest + 1, dtype=torch.int64, device=DEVICE)
    record = torch.zeros(*script.shape, VOCAB_SIZE, device=DEVICE)
    for n, text in enumerate(texts):
        script[n + 1, : len(text)] = torch.tensor(text)

    def sample(logits, rows, positions):
        # A request is known by its seed; padding has seed 0, and may be longer.
        positions = positions.clamp(max=longest)
        record[rows.seed, positions] = logits.float()
        return script[rows.seed, positions]

    def load(name):
        return backends.load_backend(name)._replace(sample=sample)

    monkeypatch.setattr(parts, "load_backend", load)
    params = [
        SamplingParams(max_tokens=len(text) - 19, seed=n + 1, ignore_eos=True)
        for n, text in enumerate(texts)
    ]
    defaults = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "num_kv_blocks": 64}
    with LLM(str(path), device=DEVICE, progress=False, **(defaults | settings)) as llm:
        outputs = llm.generate([text[:20] for text in texts], params, False)
    assert [list(o.outputs[0].token_ids)[:-1] for o in outputs] == [text[20:] for text in texts]
    return record[1:]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_teacher_forced_logits_are_those_of_transformers(
    tmp_path, monkeypatch, family, backend, enforce_eager
):
    """In bfloat16 no further from float64 than transformers is, up to a fifth; in float32 equal.
    Prompts in chunks together with decodes, then decodes alone."""
    path = tmp_path / "model"
    oracle = make_oracle(family, path)
    make = torch.Generator().manual_seed(1)
    texts = [torch.randint(256, (n,), generator=make).tolist() for n in (90, 47, 64, 33, 70)]

    frequencies = oracle.model.rotary_emb.inv_freq.clone()

    def logits_of_transformers(dtype):
        with torch.inference_mode():
            model = oracle.to(dtype)
            model.model.rotary_emb.inv_freq = frequencies  # float32, as if loaded in this type
            return [model(torch.tensor([t], device=DEVICE)).logits[0, 19:].double() for t in texts]

    how = {"attention_backend": backend, "enforce_eager": enforce_eager}
    ours = {
        dtype: forced_logits(path, texts, monkeypatch, dtype=dtype, **how)
        for dtype in ("float32", "bfloat16")
    }
    exact = torch.cat(logits_of_transformers(torch.float64))
    theirs = torch.cat(logits_of_transformers(torch.bfloat16))
    spread = exact.std(0).mean()
    for dtype, record in ours.items():
        given = torch.cat([record[n, 20 : len(text) + 1] for n, text in enumerate(texts)]).double()
        error = (given - exact).square().mean().sqrt()
        if dtype == "float32":
            assert error < 1e-4 * spread
        else:
            assert error <= 1.2 * (theirs - exact).square().mean().sqrt()


def test_without_bfloat16_the_engine_computes_in_float16(checkpoint, monkeypatch):
    """On an older GPU, with a warning; what it answers is still an answer."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: False)
    settings = {"dtype": "bfloat16", "device": DEVICE, "num_kv_blocks": 40, "progress": False}
    with (
        pytest.warns(UserWarning, match="no bfloat16; computing in float16"),
        LLM(str(checkpoint), **settings) as llm,
    ):
        assert llm.config.dtype == "float16"
        assert next(llm.engine.runner.model.parameters()).dtype == torch.float16
        assert len(tokens(llm.generate(["abc"], greedy(5), False))[0]) == 5


@needs_triton
def test_short_prompts_are_replayed_and_give_the_tokens_of_the_eager_engine(
    checkpoint, monkeypatch
):
    """Of lengths around a bucket, alone and many at once, with prefix hits, with decodes."""
    texts = ["ab" * 31 + "c", "ab" * 32, "ab" * 32 + "c", "q", "ab" * 50, "xyz" * 33]
    settings = {"num_kv_blocks": 400, "max_num_seqs": 20}
    filled = []
    fill = PromptBuckets.fill

    def noted(buckets, static, plan):
        filled.append(static.num_tokens)
        fill(buckets, static, plan)

    monkeypatch.setattr(PromptBuckets, "fill", noted)

    def answers(**more):
        alone = [tokens(run(checkpoint, [text], greedy(4), **settings, **more)) for text in texts]
        many = [greedy(2 + number) for number in range(18)]
        return alone, tokens(run(checkpoint, texts * 3, many, **settings, **more))

    expected = answers(enforce_eager=True)
    assert not filled
    assert answers() == expected
    assert set(filled) == {64, 128}, "both buckets were needed"


# -- no waiting --


@needs_triton
# PyTorch says so the first time in a process; what it does detect is what we rely on.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_launching_a_step_never_waits_for_the_device(checkpoint, enforce_eager):
    """Prompts that come and go, new blocks, penalties and logprobs: PyTorch would raise."""
    wishes = [{}, {"temperature": 0.7}, {"presence_penalty": 1.0}, {"logprobs": 2}]
    settings = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 4, "progress": False}
    with LLM(str(checkpoint), device=DEVICE, enforce_eager=enforce_eager, **settings) as llm:
        for number, wish in enumerate(wishes * 2):
            params = SamplingParams(max_tokens=6 + number, ignore_eos=True, **wish)
            llm.add_request(PROMPTS[number % len(PROMPTS)], params)
        core, launches = llm.engine, 0
        while core.scheduler.has_unfinished_requests:
            torch.cuda.set_sync_debug_mode("error")
            try:
                launches += core.launch()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            core.read()
        assert launches > 10
