"""Other kinds of tokenizers have the methods of ours, by the `tokenizers` library."""

import functools
import tempfile
from pathlib import Path

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.text.hf_tokenizer import HFTokenizer
from minivllm.tokenizer import load_tokenizer

KINDS = ("llama2", "mistral")
TEXTS = ["", "the quick brown fox", " 안녕 é\n\n 世界 ", "👩‍👩‍👧‍👦", "<s>a</s>", "it's  the dog"]


@functools.cache
def adapter(kind):
    with tempfile.TemporaryDirectory() as folder:
        path = vocabularies.checkpoint(Path(folder), kind, chat_template=vocabularies.CHATML)
        return load_tokenizer(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_the_library(kind, text):
    """Special tokens in a text count only when asked for."""
    tokenizer, library = adapter(kind), vocabularies.library(kind)
    assert isinstance(tokenizer, HFTokenizer)
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.encode(text)[0] == 1, "<s> is put first"
    literal = tokenizer.encode(text, add_special_tokens=False)
    assert not tokenizer.special_ids & set(literal)
    assert tokenizer.decode(literal).strip() == text.strip()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_stream_equals_the_whole_text(kind, data):
    """Byte tokens in any order, valid or not, and words with and without a space before."""
    tokenizer = adapter(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    detokenizer = tokenizer.detokenizer()
    text = ""
    for token_id in ids:
        text += detokenizer.push(token_id)
        assert tokenizer.decode(ids).startswith(text), "what was shown must stay true"
    assert text + detokenizer.finish() == tokenizer.decode(ids)


def test_token_without_text_keeps_the_next_space():
    """A padded id between two words is not the beginning of a text."""
    tokenizer = adapter("llama2")
    dog = tokenizer.encode("dog", add_special_tokens=False)
    ids = [*dog, 10**6, *dog]
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids) == "dog dog"


def test_stream_shows_words_as_they_come():
    """Only bytes wait for their neighbours."""
    tokenizer = adapter("llama2")
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("the é dog", add_special_tokens=False)
    pushed = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pushed) == "the é dog"
    waiting = [text for token_id, text in zip(ids, pushed) if tokenizer.is_byte(token_id)]
    assert waiting == ["", ""]
    assert sum(bool(text) for text in pushed) == len(ids) - 2


@pytest.mark.parametrize("kind", KINDS)
def test_chat_ids_are_those_of_transformers(kind):
    """For messages without special tokens."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabularies.library(kind), chat_template=vocabularies.CHATML
    )
    for text in TEXTS[:4]:
        messages = [{"role": "user", "content": text}]
        expected = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert adapter(kind).apply_chat_template(messages) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<", "</s>", "dog", " "])))
@settings(deadline=None, max_examples=80)
def test_no_message_writes_a_special_token(kind, parts):
    """What stands in a message is text; the words around it are encoded as without it."""
    tokenizer, content = adapter(kind), "".join(parts)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}], False)
    special = [i for i in ids if i in tokenizer.special_ids]
    assert special == [3, 4], "<|im_start|> and <|im_end|> of the template"
    attacked = tokenizer.apply_chat_template([{"role": "user", "content": f"{content}</s>"}])
    benign = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert attacked[:2] == benign[:2]
    assert attacked[attacked.index(4) :] == benign[benign.index(4) :]
    assert f"user\n{content}".strip() in tokenizer.decode(ids)


def test_token_bytes_are_those_of_the_text():
    """A byte token is its byte, and "▁" a space."""
    tokenizer, vocab = adapter("llama2"), vocabularies.library("llama2").get_vocab()
    assert tokenizer.token_bytes(vocab["<0xC3>"]) == b"\xc3"
    assert tokenizer.token_bytes(vocab["▁"]) == b" "
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.vocab_size == len(vocab)


def test_what_nobody_can_read_is_refused(tmp_path):
    """The message names the file and says why ours did not read it."""
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unknown"}}')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read.*'Unknown' is not BPE"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="not a str"):
        adapter("llama2").encode(None)
