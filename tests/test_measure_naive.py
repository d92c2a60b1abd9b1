"""The naive loop is slow and right: the engine must give the same tokens."""

import pytest
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams
from minivllm.measure.naive import NaiveRun, naive_generate, time_naive

PROMPTS = [list(b"The sea"), list(b"Two and two are four, and 17 letters more"), [65]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """An engine over the tiny checkpoint, with a few small blocks."""
    path = make_checkpoint(tmp_path_factory.mktemp("naive") / "tiny")
    with LLM(str(path), block_size=4, num_kv_blocks=64, progress=False) as llm:
        yield llm


def test_the_engine_gives_the_same_tokens(llm):
    """Blocks, cache and batch change the speed, not one token."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert naive_generate(llm, prompt, 12) == answer.outputs[0].token_ids


def test_the_answer_has_as_many_tokens_as_asked_for(llm):
    """The prompt is not part of it, and it is left as it was."""
    prompt = [65, 66]
    assert len(naive_generate(llm, prompt, 3)) == 3
    assert naive_generate(llm, prompt, 0) == []
    assert prompt == [65, 66]


def test_the_timed_run_keeps_the_order_of_the_prompts(llm):
    """One answer for each prompt, each what the prompt alone would get."""
    run = time_naive(llm, PROMPTS, 2)
    assert run.token_ids == [naive_generate(llm, prompt, 2) for prompt in PROMPTS]
    assert run.seconds > 0


def test_speed_counts_generated_tokens():
    """3 and 1 tokens in 2 seconds are 2 a second."""
    assert NaiveRun([[1, 2, 3], [4]], 2.0).tokens_per_s == 2.0
