"""Requests of one prompt belong together; whatever the way in, they are checked."""

import pytest
from tiny_checkpoint import VOCAB_SIZE, make_checkpoint

from minivllm import LLM, SamplingParams
from minivllm.output.prompts import EncodedPrompt


@pytest.fixture
def llm(tmp_path, request):
    """An engine on the tiny checkpoint; a parameter is its vocabulary."""
    vocab_size = getattr(request, "param", VOCAB_SIZE)
    checkpoint = make_checkpoint(tmp_path, vocab_size=vocab_size)
    with LLM(str(checkpoint), num_kv_blocks=40, block_size=4, progress=False) as llm:
        yield llm
        assert not llm.has_unfinished_requests()
        assert llm.engine.memory.pool.num_free == 40


@pytest.mark.parametrize(
    ("token_ids", "params", "words"),
    [
        ([], SamplingParams(), "the prompt is empty"),
        ([1, VOCAB_SIZE], SamplingParams(), f"{VOCAB_SIZE} in the prompt is not a token id"),
        ([1], {"temperature": 0}, "sampling_params={'temperature': 0} must be SamplingParams"),
        ([1], SamplingParams(logit_bias={VOCAB_SIZE: 1}), f"logit_bias token id={VOCAB_SIZE}"),
        ([1] * 128, SamplingParams(), "128 tokens.*max_model_len=128"),
    ],
)
def test_what_cannot_run_is_not_queued(llm, token_ids, params, words):
    """Nothing of it stays behind."""
    with pytest.raises(ValueError, match=words):
        llm.requests.add(EncodedPrompt(None, token_ids), params, "a")
    assert not llm.requests.parents
    assert not llm.requests.answers


def test_an_aborted_prompt_leaves_nothing_behind(llm):
    """Neither its answers that run nor those that have not started."""
    llm.add_request("ab", SamplingParams(n=3), "a")
    assert llm.abort("a")
    assert not llm.abort("a")
    assert not llm.requests.parents
    assert not llm.requests.answers
    assert not llm.requests._watched


@pytest.mark.parametrize("llm", [256], indirect=True)
def test_a_conversation_with_tokens_that_the_model_lacks_fails_alone(llm):
    """The template writes control tokens 256 and 257; the model has ids up to 255."""
    chats = [[{"role": "user", "content": "Hi"}]] * 2
    with pytest.warns(UserWarning, match="256 in the prompt is not a token id"):
        outputs = llm.chat(chats, SamplingParams(max_tokens=2), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    (output,) = llm.generate("Hi", SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
