"""Read `tokenizer.json`: what a byte-level BPE vocabulary is made of, in plain Python values.

Leaves out every other kind of tokenizer: `parse` refuses it by name, and `text.hf_tokenizer`
serves it. Given (no notebook builds it).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# The split of GPT-2: contractions, then letters, digits and the rest, each with one space
# before it; of a run of whitespace the last character is left to the word that follows.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")

Splitter = Callable[[str], list[str]]


@dataclass(frozen=True)
class AddedToken:
    """A token that stands beside the merges: it is found in a text as a whole, or not at all."""

    content: str
    id: int
    special: bool  # a control token: no text ever becomes it unless the caller says so


@dataclass(frozen=True)
class BytePairFile:
    """The content of a `tokenizer.json` of the byte-level BPE kind."""

    vocab: dict[str, int]  # token, in GPT-2's printable alphabet -> id
    merges: dict[tuple[str, str], int]  # pair -> rank; the lowest is merged first
    added: tuple[AddedToken, ...]
    normalize: Callable[[str], str]
    split: Splitter  # text -> words; no merge crosses the border of a word
    ignore_merges: bool  # a word that is in the vocabulary as a whole is one token
    unknown: str | None  # the token for bytes that have none; None: such bytes are dropped
    prefix_ids: tuple[int, ...]  # put before every text, such as the id of <s>
    suffix_ids: tuple[int, ...]


def checked_text(text: str) -> None:
    """Raises ValueError for what is not a str, or holds half of a surrogate pair."""
    if not isinstance(text, str):
        raise ValueError(f"text is a {type(text).__name__}; pass a str, or token ids as a prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate {text[error.start]!r} at {error.start}, which is no"
            " character; text.encode('utf-8', 'replace').decode() takes it out"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file `path`; ValueError, naming the file, if it holds no JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, not a JSON object")
    return raw


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """The content of `tokenizer.json` in the directory `path`; ValueError if there is none."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"no tokenizer.json in {path}: download it together with the checkpoint, or make it"
            " with transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(DIRECTORY)"
        )
    return read_json(file)


def read_eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """The ids that end an answer, as the checkpoint directory `path` declares them.

    `generation_config.json` is asked first, then `config.json`. A model may have several:
    `"eos_token_id": [128001, 128009]` gives `(128001, 128009)`, `2` gives `(2,)`, neither
    file or field gives `()`. Raises ValueError for anything that is no id.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        value = read_json(file).get("eos_token_id") if file.is_file() else None
        if value is not None:
            return _ids(value, file)
    return ()


def _ids(value: object, file: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ValueError(f"eos_token_id={value!r} in {file}: write a token id or a list of them")
    return tuple(dict.fromkeys(ids))  # without repetitions, in the order given


def parse(raw: Mapping[str, Any]) -> BytePairFile:
    """The parts of a `tokenizer.json`; ValueError, naming it, for the first part not supported."""
    try:
        return _parse(raw, raw["model"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"tokenizer.json is damaged: {type(error).__name__} {error}") from error


def _parse(raw: Mapping[str, Any], model: Mapping[str, Any]) -> BytePairFile:
    _refuse_other_models(model)
    prefix_ids, suffix_ids = _template(raw.get("post_processor"))
    return BytePairFile(
        vocab=model["vocab"],
        merges=_ranks(model["merges"], model["vocab"]),
        added=tuple(_added_token(t, raw.get("normalizer")) for t in raw.get("added_tokens") or ()),
        normalize=_normalizer(raw.get("normalizer")),
        split=_splitter(raw.get("pre_tokenizer")),
        ignore_merges=bool(model.get("ignore_merges")),
        unknown=model.get("unk_token"),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )


def _refuse_other_models(model: Mapping[str, Any]) -> None:
    # Old files leave the type out; only BPE has merges.
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind != "BPE":
        raise ValueError(f"tokenizer model {kind!r} is not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise ValueError(f"tokenizer model with {name}={model[name]!r} is not byte-level BPE")
    if model.get("fuse_unk") and model.get("unk_token"):
        raise ValueError("tokenizer model with fuse_unk is not supported")


def _ranks(
    merges: list[str] | list[list[str]], vocab: Mapping[str, int]
) -> dict[tuple[str, str], int]:
    # Two spellings are about: "Ġ t" and ["Ġ", "t"]. No token holds a space, so one split will do.
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
    lost = [pair for pair in ranks if pair[0] + pair[1] not in vocab]
    if lost:
        raise ValueError(f"merge {lost[0]} gives no token of the vocabulary")
    return ranks


def _added_token(raw: Mapping[str, Any], normalizer: object) -> AddedToken:
    for name in ("lstrip", "rstrip", "single_word"):
        if raw.get(name):
            raise ValueError(f"added token {raw['content']!r} with {name} is not supported")
    if not raw["content"]:
        raise ValueError(f"added token {raw['id']} is empty")
    if normalizer and raw.get("normalized"):
        raise ValueError(f"added token {raw['content']!r} of normalized text is not supported")
    return AddedToken(raw["content"], raw["id"], bool(raw.get("special")))


# --- normalizer and pre-tokenizer: each becomes a function of one string ---


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    # A part of the file is absent, one step, or a Sequence of them.
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for sub in part[inner] for step in _steps(sub, inner)]


def _normalizer(part: Mapping[str, Any] | None) -> Callable[[str], str]:
    forms = [step["type"] for step in _steps(part, "normalizers")]
    for form in forms:
        if form not in NORMAL_FORMS:
            raise ValueError(f"normalizer {form!r} is not one of {', '.join(NORMAL_FORMS)}")
    return partial(_normalize, forms)


def _normalize(forms: list[Any], text: str) -> str:
    for form in forms:
        text = unicodedata.normalize(form, text)
    return text


def _splitter(part: Mapping[str, Any] | None) -> Splitter:
    steps = _steps(part, "pretokenizers")
    # The bytes of a text become GPT-2's alphabet in the ByteLevel step, so it has to be the last.
    kinds = [step["type"] for step in steps]
    if not steps or "ByteLevel" in kinds[:-1] or kinds[-1] != "ByteLevel":
        raise ValueError(f"pre_tokenizer {kinds} does not end in ByteLevel")
    stages = [stage for step in steps if (stage := _stage(step)) is not None]
    return partial(_split, stages)


def _split(stages: list[Splitter], text: str) -> list[str]:
    words = [text]
    for stage in stages:
        words = [word for piece in words for word in stage(piece)]
    return words


def _stage(step: Mapping[str, Any]) -> Splitter | None:
    kind = step["type"]
    if kind == "Digits":
        return _isolate(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
    if kind == "Split":
        return _split_stage(step)
    if kind != "ByteLevel":
        raise ValueError(f"pre_tokenizer {kind!r} is not Digits, Split or ByteLevel")
    if step.get("add_prefix_space"):
        raise ValueError("pre_tokenizer ByteLevel with add_prefix_space is not supported")
    return _isolate(GPT2_SPLIT) if step.get("use_regex", True) else None


def _split_stage(step: Mapping[str, Any]) -> Splitter:
    pattern = step["pattern"]
    source = pattern["Regex"] if "Regex" in pattern else _escape(pattern["String"])
    behavior, invert = step["behavior"], bool(step.get("invert"))
    if behavior == "Isolated":
        return _isolate(source)
    if behavior == "Removed" and invert:
        find: Splitter = _compile(source).findall
        return find
    raise ValueError(f"pre_tokenizer Split with behavior={behavior}, invert={invert}")


def _isolate(source: str) -> Splitter:
    # Splitting at a group that spans the whole pattern keeps the matches and what lies between.
    split = _compile(source, "({})").split
    return lambda text: [word for word in split(text) if word]


def _escape(text: str) -> str:
    import regex

    return str(regex.escape(text, special_only=True))


def _compile(source: str, frame: str = "{}") -> Any:
    # Not `re`: it knows no \p{L}. The `regex` package follows a newer Unicode version than the
    # tokenizers library, so letters added to Unicode since may be split in another place.
    import regex

    try:
        if regex.compile(source).groups or "&&" in source:
            raise ValueError(f"pre_tokenizer pattern {source!r} has groups or set operations")
        return regex.compile(frame.format(source))
    except regex.error as error:
        raise ValueError(f"pre_tokenizer pattern {source!r}: {error}") from error


# --- post-processor: ids around a text ---


def _template(part: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    for step in _steps(part, "processors"):
        if step["type"] == "TemplateProcessing":
            before, after = _around(step)
            prefix, suffix = before + prefix, suffix + after
        elif step["type"] != "ByteLevel":  # ByteLevel corrects offsets, which we do not report
            raise ValueError(f"post_processor {step['type']!r} is not TemplateProcessing")
    return prefix, suffix


def _around(step: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ids: tuple[list[int], list[int]] = ([], [])
    after = 0
    for item in step["single"]:
        if "Sequence" in item:
            after = 1  # from here on: behind the text
        else:
            ids[after].extend(step["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return tuple(ids[0]), tuple(ids[1])
