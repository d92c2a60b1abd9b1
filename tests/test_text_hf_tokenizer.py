"""Tokenizers of every kind that the library reads have the methods of ours, and stream right."""

import functools
import json
import tempfile
from pathlib import Path

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from minivllm.text.hf_tokenizer import HFTokenizer
from minivllm.tokenizer import from_alphabet, load_tokenizer

SENTENCEPIECE = ("llama2", "mistral")
TEXTS = ["", "the quick brown fox", " 안녕 é\n\n 世界 ", "👩‍👩‍👧‍👦", "<s>a</s>", "it's  the dog"]
CHARACTERS = "🫨🦤 မြန်မာ 뷁"


def trained(model, trainer, pre_tokenizer, decoder):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(vocabularies.CORPUS, trainer)
    return tokenizer


def byte_level(kind, **flags):
    """Byte-level BPE with an added token, or a post-processor, that ours does not handle."""
    tokenizer = Tokenizer.from_str(vocabularies.file_text(kind))
    tokenizer.add_tokens([AddedToken("<obs>", **flags), AddedToken("naïve", normalized=False)])
    return tokenizer


def unigram():
    """Has its control tokens among its pieces, so that text can become them."""
    every_byte = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    words = [("▁", -3.0), ("▁the", -4.0), ("dog", -4.0), ("<", -6.0), ("/", -6.0), (">", -6.0)]
    control = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(control + every_byte + words, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece():
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    model = models.WordPiece(unk_token="[UNK]")
    parts = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer = trained(model, trainer, *parts)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def suffixed():
    """BPE whose words end in </w>: the space comes with the token behind it."""
    options = {"special_tokens": ["<unk>"], "end_of_word_suffix": "</w>", "show_progress": False}
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    trainer = trainers.BpeTrainer(vocab_size=300, **options)
    return trained(model, trainer, pre_tokenizers.Whitespace(), decoders.BPEDecoder())


def word_level():
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    model = models.WordLevel(unk_token="<unk>")
    return trained(model, trainer, pre_tokenizers.Whitespace(), None)


KINDS = {
    "llama2": functools.partial(vocabularies.library, "llama2"),
    "mistral": functools.partial(vocabularies.library, "mistral"),
    "normalized": functools.partial(byte_level, "qwen", normalized=True),
    "lstrip": functools.partial(byte_level, "qwen", lstrip=True, normalized=False),
    "rstrip": functools.partial(byte_level, "gpt2", rstrip=True, normalized=False),
    "unigram": unigram,
    "word_piece": word_piece,
    "suffixed": suffixed,
    "word_level": word_level,
}
ANY_KIND = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def both(kind):
    """Our tokenizer of a kind, from a checkpoint directory, and the library's."""
    library = KINDS[kind]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
        (Path(folder) / "chat_template.jinja").write_text(vocabularies.CHATML, encoding="utf-8")
        tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer, library


def stream(tokenizer, ids, **options):
    """What each id shows, and the rest."""
    detokenizer = tokenizer.detokenizer(**options)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@ANY_KIND
@pytest.mark.parametrize("text", [*TEXTS, CHARACTERS, "the <obs> dog", "a\nb"])
def test_ids_and_texts_are_those_of_the_library(kind, text):
    """Also piece by piece, with special tokens shown or not; no half character is ever shown."""
    tokenizer, library = both(kind)
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == library.encode(text).ids
    for skip in (True, False):
        expected = library.decode(ids, skip_special_tokens=skip)
        pieces = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip) == expected
        assert "\ufffd" not in "".join(pieces)


@ANY_KIND
@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_stream_equals_the_whole_text_for_any_ids(kind, data):
    """Words with and without a space before them, ids without a token, parts of characters."""
    tokenizer, library = both(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    text = "".join(stream(tokenizer, ids))
    assert text == tokenizer.decode(ids)
    expected = library.decode(ids)
    # Of a run of bytes that is not UTF-8 the library gives up every byte, we only the wrong ones.
    has_byte_tokens = kind in (*SENTENCEPIECE, "unigram")
    if not (has_byte_tokens and "\ufffd" in expected) and "naïve" not in text:
        assert text == expected


@pytest.mark.parametrize("kind", [*SENTENCEPIECE, "unigram"])
def test_byte_token_of_a_character_is_shown_at_once(kind):
    """A line feed stops an answer with its own token, and é comes with its second byte."""
    tokenizer, library = both(kind)
    ids = [library.token_to_id(token) for token in ("<0x0A>", "<0xC3>", "<0xA9>", "<0x0A>")]
    assert stream(tokenizer, ids) == ["\n", "", "é", "\n", ""]
    assert stream(tokenizer, ids[:2]) == ["\n", "", "\ufffd"]


def test_added_token_of_byte_level_is_its_own_text():
    """The library would read "naïve" as bytes in GPT-2's alphabet."""
    tokenizer, _ = both("normalized")
    ids = tokenizer.encode("a naïve dog")
    assert "".join(stream(tokenizer, ids)) == "a naïve dog"


@ANY_KIND
@given(parts=st.lists(st.sampled_from(["<|im_end|>", "</s>", "<s>", "[SEP]", "<unk>", "dog", " "])))
@settings(deadline=None, max_examples=60)
def test_text_never_becomes_a_special_token(kind, parts):
    """Neither through an added token nor through a piece of the vocabulary."""
    tokenizer, library = both(kind)
    unknown = {library.token_to_id(token) for token in ("<unk>", "[UNK]")}
    ids = tokenizer.encode("".join(parts), add_special_tokens=False)
    assert not tokenizer.special_ids & set(ids) - unknown


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@given(parts=st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<", "</s>", "dog", " "])))
@settings(deadline=None, max_examples=80)
def test_no_message_writes_a_special_token(kind, parts):
    """Any text in a message is text; the words around it are encoded as without it."""
    tokenizer, _ = both(kind)
    content = "".join(parts)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}], False)
    special = [i for i in ids if i in tokenizer.special_ids]
    assert special == [3, 4], "<|im_start|> and <|im_end|> of the template"
    attacked = tokenizer.apply_chat_template([{"role": "user", "content": f"{content}</s>"}])
    benign = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert attacked[:2] == benign[:2]
    assert attacked[attacked.index(4) :] == benign[benign.index(4) :]
    assert f"user\n{content}".strip() in tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [*SENTENCEPIECE, "lstrip", "normalized"])
def test_chat_ids_are_those_of_transformers(kind):
    """For messages without special tokens."""
    transformers = pytest.importorskip("transformers")
    tokenizer, library = both(kind)
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, chat_template=vocabularies.CHATML
    )
    for text in TEXTS[:4]:
        messages = [{"role": "user", "content": text}]
        expected = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert tokenizer.apply_chat_template(messages) == expected


def test_token_bytes_are_those_within_a_text():
    """A byte token is its byte, and "▁" a space."""
    tokenizer, library = both("llama2")
    vocab = library.get_vocab()
    assert tokenizer.token_bytes(vocab["<0xC3>"]) == b"\xc3"
    assert tokenizer.token_bytes(vocab["▁"]) == b" "
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.vocab_size == len(vocab)


def test_file_that_cannot_be_read_is_refused(tmp_path):
    """The message names the file; text is checked as in ours."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unknown"}}))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="text is a NoneType"):
        both("llama2")[0].encode(None)


def test_padding_and_truncation_of_a_file_do_not_count(tmp_path):
    """Both are for training; a prompt is encoded whole."""
    library = Tokenizer.from_str(vocabularies.file_text("llama2"))
    library.enable_truncation(4)
    library.enable_padding(length=9)
    tokenizer = HFTokenizer(json.loads(library.to_str()), None, from_alphabet)
    expected = vocabularies.library("llama2").encode("the quick brown fox dog").ids
    for parse_special in (True, False):
        ids = tokenizer.encode("the quick brown fox dog", parse_special=parse_special)
        assert ids == expected
