"""What may be handed in as a prompt, and what is refused with which words."""

import math

import numpy as np
import pytest
from tiny_checkpoint import END, START, make_checkpoint

from minivllm.output.prompts import (
    encode_chat,
    encode_prompt,
    is_conversation,
    is_one_conversation,
    is_one_prompt,
    max_num_tokens,
    params_for_each,
    require_token_ids,
)
from minivllm.request import SamplingParams
from minivllm.text.chat_template import ChatTemplate
from minivllm.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Tokens are bytes, and three control tokens."""
    return load_tokenizer(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("value", "prompt", "conversation", "one_conversation"),
    [
        ("abc", True, False, True),
        ("", True, False, True),
        ([1, 2], True, False, False),
        ((1, np.int64(2)), True, False, False),
        (np.array([1, 2]), True, False, None),
        ([1.5, math.nan], True, False, False),
        ({"prompt_token_ids": [1]}, True, False, True),
        (b"abc", True, False, True),
        ({1, 2}, True, False, True),
        (None, True, False, True),
        (5, True, False, True),
        (["abc", "abd"], False, False, False),
        (["abc", None], False, False, False),
        ([[1, 2], [3]], False, False, False),
        (np.array([[1, 2], [3, 4]]), False, False, None),
        ([], False, False, True),
        (MESSAGES, False, True, True),
        ([*MESSAGES, None], False, True, True),
        ([MESSAGES, MESSAGES], False, False, False),
    ],
)
def test_the_forms_are_told_apart(value, prompt, conversation, one_conversation):
    """One prompt, right or wrong, or several; the same for conversations."""
    assert is_one_prompt(value) is prompt
    assert is_conversation(value) is conversation
    if one_conversation is not None:
        assert is_one_conversation(value) is one_conversation


def test_a_generator_of_prompts_loses_none():
    """Telling it apart takes nothing from it."""
    for form in (is_one_prompt, is_one_conversation):
        prompts = (text for text in ("abc", "abd"))
        assert form(prompts) is False
        assert list(prompts) == ["abc", "abd"]


def test_text_ids_and_dict_are_the_same_prompt(tokenizer):
    """Only a text is kept as text."""
    for prompt in ("ab", {"prompt": "ab"}, {"prompt": "ab", "prompt_token_ids": [97, 98]}):
        encoded = encode_prompt(prompt, tokenizer)
        assert (encoded.text, encoded.token_ids) == ("ab", [97, 98])
    ids = np.array([97, 98])
    for prompt in ([97, 98], (97, 98), range(97, 99), ids, list(ids), {"prompt_token_ids": ids}):
        encoded = encode_prompt(prompt, tokenizer)
        assert (encoded.text, encoded.token_ids) == (None, [97, 98])
        assert {type(token_id) for token_id in encoded.token_ids} == {int}


def test_control_tokens_count_in_a_prompt_and_are_text_in_a_message(tokenizer):
    """A program writes prompts, a stranger writes messages."""
    assert encode_prompt("<|start|>", tokenizer).token_ids == [START]
    chat = encode_chat([{"role": "user", "content": "<|end|>"}], tokenizer)
    assert chat.token_ids.count(END) == 1, "only the template's own"
    assert chat.text == "<|start|>user\n<|end|><|end|><|start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([259], "259 in the prompt is not a token id.*0 to 258"),
        ([-1], "-1 in the prompt"),
        ([1.0], "1.0 in the prompt"),
        ([math.nan], "nan in the prompt"),
        ([np.float32(1)], "1.0 in the prompt"),
        ([True], "True in the prompt"),
        ([None], "None in the prompt"),
        (["x" * 1000], r"'x+\.\.\.x+' in the prompt"),
        (None, "None is not a prompt; pass a text, a list of token ids"),
        (5, "5 is not a prompt"),
        (b"abc", "b'abc' is not a prompt"),
        ({97, 98}, "is not a prompt"),
        ((i for i in [97]), "generator ob.* is not a prompt"),
        ({"prompt_token_ids": "abc"}, "is not a prompt"),
        ({"prompt": b"abc"}, "text is a bytes"),
        ({}, r"key 'prompt' or 'prompt_token_ids'; this one has \[\]"),
        ({"prompt": "abc", "images": []}, r"this one has \['prompt', 'images'\]"),
    ],
)
def test_bad_prompts_are_refused_with_the_value(tokenizer, prompt, words):
    """The message says what is wrong with which value."""
    with pytest.raises(ValueError, match=words):
        require_token_ids(encode_prompt(prompt, tokenizer).token_ids, 259)


@pytest.mark.parametrize("messages", ["Hi", [], ["Hi"], [MESSAGES], None])
def test_what_is_not_a_conversation_is_refused_with_an_example(tokenizer, messages):
    """A text, an empty list, a list of lists."""
    with pytest.raises(ValueError, match='a message is .*"role": "user"'):
        encode_chat(messages, tokenizer)


def test_a_chat_without_tokens_is_refused(tmp_path):
    """A template may leave out everything."""
    tokenizer = load_tokenizer(make_checkpoint(tmp_path))
    tokenizer.template = ChatTemplate("{{ messages[0].content }}")
    assert encode_chat(MESSAGES, tokenizer).token_ids == [72, 105]
    with pytest.raises(ValueError, match="makes no tokens of these messages"):
        encode_chat([{"role": "user", "content": ""}], tokenizer)


def test_settings_are_one_for_all_or_one_for_each():
    """And nothing else than settings."""
    one, other = SamplingParams(), SamplingParams(seed=1)
    assert params_for_each(one, 2) == [one, one]
    assert params_for_each((one, other), 2) == [one, other]
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        params_for_each([one, other], 3)
    for wrong in ({"temperature": 0}, None, "x", [one, None], iter([one, one])):
        with pytest.raises(ValueError, match=r"sampling_params=.* must be SamplingParams"):
            params_for_each(wrong, 2)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"), [(5, 3, 8), (5, None, 20), (5, 100, 20), (19, 7, 20)]
)
def test_an_answer_ends_at_max_tokens_or_max_model_len(prompt, max_tokens, expected):
    """Prompt and answer together; at most 20 here."""
    assert max_num_tokens(prompt, max_tokens, 20) == expected


@pytest.mark.parametrize("length", [20, 21])
def test_a_prompt_without_room_for_an_answer_is_refused_with_both_numbers(length):
    """The longest prompt is one shorter than max_model_len."""
    with pytest.raises(ValueError, match=f"{length} tokens.*max_model_len=20"):
        max_num_tokens(length, 1, 20)
