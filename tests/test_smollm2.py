"""The real model: SmolLM2-135M-Instruct answers token for token as `transformers` does.

`data/smollm2_greedy.json` holds what transformers generates in float32, one prompt at a time
(`data/make_smollm2_greedy.py` writes it); one test here proves it against the live library.
"""

import json
from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.checkpoint.hub import resolve_model

pytestmark = pytest.mark.model

RECORDS = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
PROMPTS = [record["prompt"] for record in RECORDS]
ANSWERS = [record["answer"] for record in RECORDS]


def make_llm(**settings):
    """SmolLM2 in float32, invariants checked in every step."""
    llm = LLM("smollm2-135m", dtype="float32", device="cpu", progress=False, **settings)
    llm.engine.check_invariants = True
    return llm


def greedy(num_tokens):
    """Exactly so many tokens, end-of-sequence or not."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def first(num_tokens):
    """The first tokens of the stored answers."""
    return [answer[:num_tokens] for answer in ANSWERS]


def answers(llm, prompts, num_tokens):
    """Token ids of all answers, and the outputs they came in."""
    outputs = llm.generate(prompts, greedy(num_tokens), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], outputs


# Numbers that never change; the logits are compared with the live library in test_model.
@pytest.mark.slow
def test_stored_answers_are_what_transformers_gives():
    """Teacher-forced through the live library: every stored token is its most probable one."""
    transformers = pytest.importorskip("transformers")
    path = resolve_model("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for record in RECORDS:
        pairs = [(record["prompt"], record["answer"])]
        if "second_prompt" in record:
            pairs.append((record["second_prompt"], record["second_answer"]))
        for prompt, answer in pairs:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + answer])).logits[0]
            assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == answer


@pytest.fixture(scope="module")
def llm():
    """An engine with the settings that it chooses by itself."""
    with make_llm() as llm:
        yield llm


def test_eight_prompts_together_and_a_second_turn_from_the_cache(llm):
    """8 x 64 tokens in one batch; then two go on, their first turn found in the cache."""
    assert answers(llm, PROMPTS, 64)[0] == ANSWERS
    second = [record for record in RECORDS if "second_prompt" in record]
    prompts = [record["second_prompt"] for record in second]
    given, outputs = answers(llm, prompts, 24)
    assert given == [record["second_answer"] for record in second]
    for prompt, output in zip(PROMPTS, outputs):
        # All of the first turn's full blocks, but for its last token, which was never fed.
        assert output.num_cached_tokens == (len(prompt) + 63) // 16 * 16


def test_chunked_prefill_changes_no_token():
    """A budget of 32 tokens a step: the long prompt comes in three chunks."""
    with make_llm(max_num_batched_tokens=32, max_num_seqs=8) as llm:
        assert answers(llm, PROMPTS, 24)[0] == first(24)


def test_preemption_changes_no_token():
    """Room for about half of what eight answers need: requests are thrown out and come back."""
    with make_llm(num_kv_blocks=20, max_num_seqs=8) as llm:
        given, outputs = answers(llm, PROMPTS, 24)
        assert given == first(24)
        assert sum(output.num_preemptions for output in outputs) > 0


def test_an_answer_ends_where_the_model_ends_it(llm):
    """Without `ignore_eos` the capital of France is Paris, full stop."""
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=64), False)[0]
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == 2
