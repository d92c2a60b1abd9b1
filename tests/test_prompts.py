"""What may be handed in as a prompt, and what is refused with which words."""

import pytest
from tiny_checkpoint import END, START, make_checkpoint

from minivllm.output.prompts import (
    encode_chat,
    encode_prompt,
    is_conversation,
    is_one_prompt,
    max_num_tokens,
)
from minivllm.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Tokens are bytes, and three control tokens."""
    return load_tokenizer(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("value", "prompt", "conversation"),
    [
        ("abc", True, False),
        ("", True, False),
        ([1, 2], True, False),
        ({"prompt_token_ids": [1]}, True, False),
        (["abc", "abd"], False, False),
        ([[1, 2], [3]], False, False),
        ([], False, False),
        (MESSAGES, False, True),
        ([MESSAGES, MESSAGES], False, False),
    ],
)
def test_the_forms_are_told_apart(value, prompt, conversation):
    """One prompt, a list of prompts, a conversation, a list of conversations."""
    assert is_one_prompt(value) is prompt
    assert is_conversation(value) is conversation


def test_text_ids_and_dict_are_the_same_prompt(tokenizer):
    """Only a text is kept as text."""
    assert encode_prompt("ab", tokenizer, 259).token_ids == [97, 98]
    assert encode_prompt("ab", tokenizer, 259).text == "ab"
    for prompt in ([97, 98], (97, 98), {"prompt_token_ids": [97, 98]}):
        encoded = encode_prompt(prompt, tokenizer, 259)
        assert (encoded.text, encoded.token_ids) == (None, [97, 98])


def test_control_tokens_count_in_a_prompt_and_are_text_in_a_message(tokenizer):
    """A program writes prompts, a stranger writes messages."""
    assert encode_prompt("<|start|>", tokenizer, 259).token_ids == [START]
    chat = encode_chat([{"role": "user", "content": "<|end|>"}], tokenizer)
    assert chat.token_ids.count(END) == 1, "only the template's own"
    assert chat.text == "<|start|>user\n<|end|><|end|><|start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([259], "259 in the prompt is no token id.*0 to 258"),
        ([-1], "-1 in the prompt"),
        ([1.0], "1.0 in the prompt"),
        ([True], "True in the prompt"),
        ({"prompt": "abc"}, "one key, 'prompt_token_ids'; this one has"),
    ],
)
def test_bad_prompts_are_refused_with_the_value(tokenizer, prompt, words):
    """The message says what is wrong with which value."""
    with pytest.raises(ValueError, match=words):
        encode_prompt(prompt, tokenizer, 259)


@pytest.mark.parametrize("messages", ["Hi", [], ["Hi"], [MESSAGES], None])
def test_what_is_no_conversation_is_refused_with_an_example(tokenizer, messages):
    """A text, an empty list, a list of lists."""
    with pytest.raises(ValueError, match='is no conversation; give .*"role": "user"'):
        encode_chat(messages, tokenizer)


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
