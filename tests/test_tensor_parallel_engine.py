"""A whole engine in shards gives the tokens of the whole model; the ranks are threads here.

Real processes are in test_distributed_workers.py.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import VOCAB_SIZE, make_checkpoint

from course.props.ranks import ThreadTeam
from minivllm import LLM, SamplingParams
from minivllm.distributed.process_group import GroupError

pytestmark = pytest.mark.long

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3], [5] * 30, list(range(40, 60))]


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr("minivllm.assembly.ranks.Team", ThreadTeam)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function: changes to the tiny config -> a checkpoint directory."""

    def make(**changes):
        return make_checkpoint(tmp_path_factory.mktemp("tiny"), **changes)

    return make


def answers(path, size, *batches, params=GREEDY, **settings):
    """Token ids of all answers to one batch after the other, on `size` ranks."""
    settings = {"attention_backend": "torch", "progress": False} | settings
    outputs = []
    with LLM(str(path), tensor_parallel_size=size, **settings) as llm:
        for prompts in batches or (PROMPTS,):
            outputs += llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (8, 2)])
def test_any_number_of_ranks_gives_the_tokens_of_one(checkpoint, heads, kv_heads):
    """Batch 1 and 3; with fewer key/value heads than ranks, several ranks hold the same one. The
    vocabulary is odd: it is padded."""
    assert VOCAB_SIZE % 2, "the vocabulary must not divide evenly"
    path = checkpoint(num_attention_heads=heads, num_key_value_heads=kv_heads)
    expected = answers(path, 1, PROMPTS[:1], PROMPTS)
    for size in (2, 4):
        assert answers(path, size, PROMPTS[:1], PROMPTS) == expected, f"{size} ranks"


def test_three_heads_need_three_ranks(checkpoint):
    """Like SmolLM2. Two and four are refused with the numbers, and no rank is started."""
    path = checkpoint(num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    assert answers(path, 3) == answers(path, 1)
    for size in (2, 4):
        with pytest.raises(ValueError, match=r"3 query heads, 3 key/value heads.*can be 1, 3$"):
            answers(path, size)


def test_untied_embeddings_are_cut_as_well(checkpoint):
    """The product with the vocabulary has weights of its own then."""
    path = checkpoint(tie_word_embeddings=False)
    assert answers(path, 2) == answers(path, 1)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
    ],
)
def test_biases_and_head_norms_count_once(checkpoint, architecture, changes):
    """Biases behind a sum are added by every rank once, not by each to its part."""
    path = checkpoint(architectures=[architecture], **changes)
    expected = answers(path, 1)
    assert answers(path, 2) == expected
    assert answers(path, 4) == expected


def test_chunked_prompts_prefixes_and_preemption(checkpoint):
    """Steps of 8 tokens; a second round finds prefixes; memory for one and a half requests."""
    path = checkpoint()
    tight = {"block_size": 4, "num_kv_blocks": 14, "max_num_batched_tokens": 8, "max_num_seqs": 3}
    prompts = [[7] * 20, [7] * 20 + [8, 9], list(range(60, 80))] * 2
    found = []
    for size in (1, 2):
        settings = {"attention_backend": "torch", "progress": False, "max_model_len": 40}
        with LLM(str(path), tensor_parallel_size=size, **settings, **tight) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            outputs += llm.generate(prompts, GREEDY, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert sum(output.num_preemptions for output in outputs) > 0
        assert sum(output.num_cached_tokens for output in outputs) > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_knob_of_the_sampler_is_the_leaders_alone(checkpoint, overlap):
    """Seeds, filters, penalties, biases, logprobs: the same on one rank and on two."""
    path = checkpoint()
    params = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=10, logprobs=2),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=3, max_tokens=10),
        SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={7: 3.0}, max_tokens=10),
    ]
    expected = answers(path, 1, params=params, overlap=overlap)
    assert answers(path, 2, params=params, overlap=overlap) == expected


def test_aborted_requests_give_their_rows_back_on_all_ranks(checkpoint):
    """More requests than rows, one after the other, some of them aborted."""
    settings = {"attention_backend": "torch", "progress": False, "max_num_seqs": 2}
    with LLM(str(checkpoint()), tensor_parallel_size=2, **settings) as llm:
        for number in range(6):
            llm.add_request([number + 1, 2, 3], GREEDY, f"r{number}")
            llm.step()
            if number % 2:
                llm.abort(f"r{number}")
        while llm.has_unfinished_requests():
            llm.step()
        assert not llm.engine.runner.directory.number_of
        assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].finished


def test_after_a_step_that_broke_off_the_engine_is_at_its_end(checkpoint):
    """The ranks stand at different places, and that cannot be mended: every call says so."""
    with LLM(
        str(checkpoint()),
        tensor_parallel_size=2,
        attention_backend="torch",
        progress=False,
        distributed_timeout_seconds=1,
    ) as llm:
        runner = llm.engine.runner.runner
        runner.step, step = (lambda plan: 1 / 0), runner.step
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        runner.step = step
        for _ in range(2):
            with pytest.raises(GroupError, match=r"broke off \(ZeroDivision.*make a new LLM"):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_ranks_agree_on_the_number_of_blocks(checkpoint, monkeypatch):
    """The one with the least memory says how many."""
    counts = iter([50, 20, 30])
    monkeypatch.setattr(
        "minivllm.assembly.sizing.num_blocks_that_fit", lambda *arguments: next(counts)
    )
    path = checkpoint(num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    settings = {"attention_backend": "torch", "progress": False}
    with LLM(str(path), tensor_parallel_size=3, **settings) as llm:
        assert llm.config.num_kv_blocks == 20
        assert llm.engine.memory.pool.num_blocks == 20


def test_what_the_machine_cannot_do_is_refused_before_anything_starts(checkpoint, monkeypatch):
    """Too few GPUs; a recorder that would not see the sums. The remedy is in the message."""
    monkeypatch.setattr("minivllm.assembly.ranks.Team", None)  # starting one would fail
    with pytest.raises(ValueError, match="enforce_eager=False: on a CPU the sums .* leave"):
        answers(checkpoint(), 2, device="cpu", enforce_eager=False)
    monkeypatch.setattr("minivllm.assembly.ranks.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="size=4 needs 4 GPUs on this machine, .* sees 2; lower"):
        answers(checkpoint(), 4, device="cuda")


def test_each_rank_holds_only_its_part(checkpoint):
    """The weights of two ranks together are as large as the whole model's, but for the norms and
    a row of padding; each has half of the key/value heads."""
    sizes = []
    for size in (1, 2):
        settings = {"attention_backend": "torch", "progress": False, "num_kv_blocks": 10}
        with LLM(str(checkpoint()), tensor_parallel_size=size, **settings) as llm:
            runner = llm.engine.runner if size == 1 else llm.engine.runner.runner
            sizes.append(sum(p.numel() for p in runner.model.parameters()))
            assert runner.kv_cache.shape[4] == 2 // size
    norms, row = 5 * 32, 32
    assert 2 * (sizes[1] - norms) == sizes[0] - norms + row
