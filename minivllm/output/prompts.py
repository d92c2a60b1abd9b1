"""What a user may hand in as a prompt, and the token ids it stands for.

Every mistake is a ValueError that names the value and the remedy. Leaves out the queue and the
answers (`llm`, `output.processor`). Given (no notebook builds it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A text, token ids, or {"prompt_token_ids": [...]}.
Prompt = str | Sequence[int] | Mapping[str, Any]
# Messages, oldest first: [{"role": "user", "content": "Hello"}].
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it."""

    text: str | None  # None where token ids were given
    token_ids: list[int]


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt, not a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return bool(prompts) and all(isinstance(part, int) for part in prompts)


def is_conversation(value: Any) -> bool:
    """Whether this is a list of messages, not a prompt and not a list of conversations."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and bool(value) and all(isinstance(part, Mapping) for part in value)


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> EncodedPrompt:
    """The token ids of a prompt. Control tokens of the model written in a text count as such.

    Raises ValueError for an empty prompt, an id outside the vocabulary, a wrong dict.
    """
    given = _token_ids_of(prompt) if isinstance(prompt, Mapping) else prompt
    if isinstance(given, str):
        encoded = EncodedPrompt(given, tokenizer.encode(given, parse_special=True))
    else:
        encoded = EncodedPrompt(None, list(given))
    if given == "" or not encoded.token_ids:
        raise ValueError("the prompt is empty; give it at least one token")
    for token_id in encoded.token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{token_id!r} in the prompt is no token id; ids are whole numbers from 0 to"
                f" {vocab_size - 1}"
            )
    return encoded


def encode_chat(
    messages: Conversation,
    tokenizer: Any,
    add_generation_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> EncodedPrompt:
    """The token ids that the model's chat template makes of a conversation.

    Control tokens written in a message are encoded as text. Raises ValueError for what is no
    list of messages, and for a model without a template.
    """
    if not is_conversation(messages):
        raise ValueError(
            f"{messages!r} is no conversation; give a list of messages such as"
            ' [{"role": "user", "content": "Hello"}]'
        )
    options = (messages, add_generation_prompt, chat_template_kwargs)
    text = tokenizer.render_chat(*options)
    return EncodedPrompt(text, tokenizer.apply_chat_template(*options))


def max_num_tokens(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """The length, prompt and answer together, at which an answer ends.

    5 tokens with `max_tokens=3` end at 8. Raises ValueError for a prompt that leaves no room
    for an answer.
    """
    if num_prompt_tokens >= max_model_len:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens; with at least one for the answer it"
            f" must be below max_model_len={max_model_len}. Shorten it or raise max_model_len"
        )
    wanted = max_model_len if max_tokens is None else num_prompt_tokens + max_tokens
    return min(wanted, max_model_len)


def _token_ids_of(prompt: Mapping[str, Any]) -> Any:
    if set(prompt) != {"prompt_token_ids"}:
        raise ValueError(
            f"a prompt as a dict has one key, 'prompt_token_ids'; this one has {sorted(prompt)}"
        )
    return prompt["prompt_token_ids"]
