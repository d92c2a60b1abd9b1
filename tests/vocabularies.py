"""Small vocabularies of the common kinds, trained in the test: what the tokenizers read."""

import functools
import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's the dog's day, and they'll say so.",
    "def forward(self, x):\n    return self.norm(x)  # 1234 tokens\n\n",
    "안녕하세요 세계, 오늘은 날씨가 좋습니다. 世界、こんにちは。 Привет, мир! héllo wörld",
    "👩‍👩‍👧‍👦 🇰🇷 👍🏽 emoji and   runs \t of\n\n\nwhitespace   ",
] * 4
# A conversation as the models of the SmolLM2 and Qwen families write it.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTE_LEVEL = ("gpt2", "smollm", "llama3", "qwen")


def byte_level(split=None, normalizer=None, alphabet=True, **model):
    """A trained byte-level BPE; `alphabet=False` leaves it without the bytes it did not see."""
    tokenizer = Tokenizer(models.BPE(**model))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None or split[1])
    steps = [last] if split is None else [split[0], last]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    known = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=known, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def pattern(text):
    return pre_tokenizers.Split(Regex(text), "isolated"), False


@functools.cache
def library(kind):
    """The `tokenizers` library's own object: the oracle."""
    if kind == "gpt2":
        return byte_level()
    if kind == "smollm":
        return byte_level((pre_tokenizers.Digits(individual_digits=True), True), alphabet=False)
    if kind == "qwen":
        tokenizer = byte_level(pattern(QWEN_SPLIT), normalizers.NFC())
        thoughts = [AddedToken(text, normalized=False) for text in ("<think>", "</think>")]
        tokenizer.add_tokens(thoughts)  # added, but not special
        return tokenizer
    if kind == "llama3":
        tokenizer = byte_level(pattern(LLAMA3_SPLIT), ignore_merges=True)
        bos = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), bos])
        return tokenizer
    return Tokenizer.from_str(json.dumps(sentencepiece_like(kind)))


def sentencepiece_like(kind):
    """The file of a BPE that falls back to byte tokens, with "▁" for the space.

    "llama2" puts a space before every piece of text, "mistral" before the first one only.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "llama2":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    control = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=control + every_byte, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[:1], trainer)
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = bos
    file = json.loads(tokenizer.to_str())
    # The trainer knows no other way to reserve the byte tokens, but they are ordinary ones.
    file["added_tokens"] = file["added_tokens"][: len(control)]
    return file


@functools.cache
def file_text(kind):
    return library(kind).to_str()


def raw(kind):
    """The content of `tokenizer.json`; a fresh copy each time."""
    return json.loads(file_text(kind))


def checkpoint(path, kind, **config):
    """Writes tokenizer.json and tokenizer_config.json into the directory `path`."""
    (path / "tokenizer.json").write_text(file_text(kind), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
