"""What counts as a prompt, and how it becomes token ids.

Every mistake is a ValueError that names the value and the remedy. Does not handle the queue and
the answers (see `llm`, `output.processor`). Not built in the course.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

from minivllm.request import SamplingParams, as_list, plain_number

# A text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}.
Prompt = str | Sequence[int] | Mapping[str, Any]
# Messages, oldest first: [{"role": "user", "content": "Hello"}].
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it."""

    text: str | None  # None where token ids were given
    token_ids: list[int]


# -- one or several ---------------------------------------------------------------------------


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt, right or wrong, and not an iterable of prompts."""
    # A generator is not looked into: that would use up its first prompt.
    parts = as_list(prompts) if hasattr(prompts, "__len__") else ()
    return _is_single(prompts) or (
        len(parts) > 0 and all(isinstance(part, Number) for part in parts)
    )


def is_one_conversation(conversations: Any) -> bool:
    """Whether this is one conversation, right or wrong, and not an iterable of conversations."""
    return _is_single(conversations) or not conversations or is_conversation(conversations)


def is_conversation(value: Any) -> bool:
    """Whether this is a list of messages, not a prompt and not a list of conversations."""
    return isinstance(value, (list, tuple)) and any(isinstance(part, Mapping) for part in value)


def _is_single(value: Any) -> bool:
    is_whole = isinstance(value, (str, bytes, bytearray, Mapping, set, frozenset))
    return is_whole or not isinstance(value, Iterable)


def params_for_each(params: Any, count: int) -> list[SamplingParams]:
    """Return the settings of each of `count` prompts; `params` is one for all or one for each.

    Raises ValueError for another number of them, and for anything but SamplingParams.
    """
    each = list(params) if isinstance(params, (list, tuple)) else [params] * count
    if len(each) != count:
        raise ValueError(
            f"{count} prompts and {len(each)} sampling_params; give one for all or one for each"
        )
    for one in each:
        if not isinstance(one, SamplingParams):
            raise ValueError(
                f"sampling_params={reprlib.repr(one)} must be SamplingParams(...), one for all"
                " prompts or a list with one for each"
            )
    return each


# -- from prompts to token ids ----------------------------------------------------------------


def encode_prompt(prompt: Prompt, tokenizer: Any) -> EncodedPrompt:
    """Return the token ids of a prompt. Control tokens written in a text count as such.

    `{"prompt": text}` is the text; with `prompt_token_ids` those are what the model reads.
    Raises ValueError for another type. The ids are checked where the prompt is queued
    (`OutputProcessor.add`).
    """
    text, token_ids = _text_and_ids(prompt)
    if token_ids is None and text is not None:
        # An empty text has no tokens, although a model may put some around it.
        token_ids = [] if text == "" else tokenizer.encode(text, parse_special=True)
    if not isinstance(token_ids, (list, tuple, range)):
        raise ValueError(
            f"{reprlib.repr(prompt)} is not a prompt; pass a text, a list of token ids,"
            ' {"prompt": text} or {"prompt_token_ids": [...]}'
        )
    if set(map(type, token_ids)) != {int}:  # numpy's integers count as well
        token_ids = [plain_number(token_id) for token_id in token_ids]
    return EncodedPrompt(text, list(token_ids))


def _text_and_ids(prompt: Any) -> tuple[Any, Any]:
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, as_list(prompt)
    if not prompt or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        raise ValueError(
            "a prompt as a dict has the key 'prompt' or 'prompt_token_ids'; this one has"
            f" {reprlib.repr(list(prompt))}"
        )
    return prompt.get("prompt"), as_list(prompt.get("prompt_token_ids"))


def require_token_ids(token_ids: Sequence[Any], vocab_size: int) -> None:
    """Raise ValueError unless there is a token, and each is an int from 0 to `vocab_size` - 1."""
    if not token_ids:
        raise ValueError("the prompt is empty; give it at least one token")
    # Without a Python loop: at 100,000 tokens that would take as long as a step.
    if set(map(type, token_ids)) == {int} and 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return
    bad = next(i for i in token_ids if type(i) is not int or not 0 <= i < vocab_size)
    raise ValueError(
        f"{reprlib.repr(bad)} in the prompt is not a token id; ids are whole numbers from 0 to"
        f" {vocab_size - 1}"
    )


def encode_chat(
    messages: Conversation,
    tokenizer: Any,
    add_generation_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> EncodedPrompt:
    """Return the token ids that the model's chat template makes of a conversation.

    Control tokens written in a message are encoded as text. Raises ValueError for messages that
    the template cannot take, and for a model without a template.
    """
    options = (messages, add_generation_prompt, chat_template_kwargs)
    token_ids = tokenizer.apply_chat_template(*options)
    if not token_ids:
        raise ValueError(
            "the model's chat template makes no tokens of these messages; add a message with text"
        )
    return EncodedPrompt(tokenizer.template.render(*options), token_ids)


def max_num_tokens(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Return the length, prompt and answer together, at which an answer ends.

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
