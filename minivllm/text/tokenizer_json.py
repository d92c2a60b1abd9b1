"""Read `tokenizer.json`: what a byte-level BPE vocabulary is made of, in plain Python values.

The `tokenizers` library normalizes and splits the text. Does not handle other kinds of
tokenizers (see `text.hf_tokenizer`). Not built in the course.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class AddedToken:
    """A token that merges don't produce: it is matched in the text as a whole."""

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
    split: Callable[[str], list[str]]  # text -> words; no merge crosses the border of a word
    ignore_merges: bool  # a word that is in the vocabulary as a whole is one token
    unknown: str | None  # the token for bytes that have none; None: such bytes are dropped
    prefix_ids: tuple[int, ...]  # put before every text, such as the id of <s>
    suffix_ids: tuple[int, ...]

    @cached_property
    def _library_model(self) -> Any:
        from tokenizers.models import BPE

        merges = sorted(self.merges, key=self.merges.__getitem__)
        return BPE(self.vocab, merges, unk_token=self.unknown)

    def long_word_tokens(self, word: str) -> list[str]:
        """The tokens of `tokenizer.encode_word`, in O(n log n) instead of O(n²) steps."""
        return [token.value for token in self._library_model.tokenize(word)]


def checked_text(text: str) -> None:
    """Raise ValueError unless `text` is a str without lone surrogates."""
    if not isinstance(text, str):
        raise ValueError(f"text is a {type(text).__name__}; pass a str, or token ids as a prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate {text[error.start]!r} at {error.start}, which is not a"
            " character; text.encode('utf-8', 'replace').decode() replaces it"
        ) from error


@contextmanager
def damage_named(files: str) -> Iterator[None]:
    """Raise ValueError, naming `files`, where the block meets a value of an unexpected kind."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        words = f"{type(error).__name__} {error}"
        raise ValueError(f"{files} is damaged ({words}); download it again") from error


# -- files ------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file `path`; ValueError, naming the file, if it holds none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); download it again (with `git lfs pull` if it is"
            " a Git LFS pointer)"
        ) from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, not a JSON object")
    return raw


def read_if_present(path: Path) -> dict[str, Any]:
    """Return the object in the file `path`; an empty one if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Return the content of `tokenizer.json` in the directory `path`.

    Its `added_tokens` include those that only `tokenizer_config.json` declares. Raises
    ValueError if there is no `tokenizer.json`.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"no tokenizer.json in {path}: download it together with the checkpoint, or make it"
            " with transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(DIRECTORY)"
        )
    return _with_declared(read_json(file), read_if_present(path / "tokenizer_config.json"))


def _with_declared(raw: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    ids = token_ids(raw)
    added = {token["content"]: token for token in raw.get("added_tokens") or ()}
    for declared in _declared(config):
        content = declared["content"]
        if content not in ids:  # a token without an id gets the next free one, as in transformers
            ids[content] = declared.get("id", max(ids.values(), default=-1) + 1)
        token = {**dict.fromkeys(FLAGS, False), **declared, "id": ids[content]}
        known = added.setdefault(content, token)
        added[content] = known | {"special": known.get("special") or token["special"]}
    return raw | {"added_tokens": sorted(added.values(), key=lambda token: token["id"])}


def _declared(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of a `tokenizer_config.json`; those that it names are special."""
    numbered = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or ()
    named = [config.get(name) for name in TOKEN_NAMES]
    named += config.get("additional_special_tokens") or ()
    named += extra.values() if isinstance(extra, dict) else extra
    return [{**token, "id": int(token_id)} for token_id, token in numbered.items()] + [
        {**token, "special": True}
        if isinstance(token, dict)
        else {"content": token, "special": True}
        for token in named
        if token
    ]


def token_ids(raw: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each token of a `tokenizer.json` of any kind."""
    vocab = (raw.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, list):  # Unigram: [token, score], in the order of the ids
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in raw.get("added_tokens") or ()}}


def special_token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, … of a `tokenizer_config.json`, each as its text."""
    found = {name: config[name] for name in TOKEN_NAMES if config.get(name)}
    return {name: tok["content"] if isinstance(tok, dict) else tok for name, tok in found.items()}


def read_eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """Return the ids that end an answer, as the checkpoint directory `path` declares them.

    All those of `generation_config.json`, `config.json` and the tokenizer's `eos_token`:
    `"eos_token_id": [5, 6]` in the first and `6` in the second give `(5, 6)`; no field gives
    `()`. Raises ValueError for a value that is not an id.
    """
    directory = Path(path)
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_if_present(directory / name).get("eos_token_id")
        if value is not None:
            found += _checked_ids(value, directory / name)
    config = read_if_present(directory / "tokenizer_config.json")
    if config.get("eos_token") and (directory / "tokenizer.json").is_file():
        with damage_named(f"tokenizer_config.json in {directory}"):
            eos = special_token_names(config)["eos_token"]
            found.append(token_ids(read_tokenizer_json(directory))[eos])
    return tuple(dict.fromkeys(found))


def _checked_ids(value: object, file: Path) -> list[int]:
    ids: list[Any] = value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ValueError(f"eos_token_id={value!r} in {file}: write a token id or a list of them")
    return ids


# -- byte-level BPE ---------------------------------------------------------------------------


def read_library(raw: Mapping[str, Any]) -> Any:
    """Return the library's tokenizer, without padding and truncation, of a `tokenizer.json`.

    Raises ValueError if the library cannot read it.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps({**raw, "padding": None, "truncation": None}))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(
            f"tokenizer.json cannot be read: {error}. Download it again, or update the tokenizers"
            " package"
        ) from error


def unsupported_parts(raw: Mapping[str, Any]) -> Iterator[str]:
    """Name each part of a `tokenizer.json` that `parse` does not handle."""
    model = raw.get("model") or {}
    # Old files do not name the type; only BPE has merges.
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind != "BPE":
        yield f"tokenizer model {kind!r} is not BPE"
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    for name in ("dropout", "byte_fallback", "fuse_unk", *affixes):
        if model.get(name):
            yield f"tokenizer model with {name}={model[name]!r} is not supported"
    # The bytes of a text become GPT-2's alphabet in the ByteLevel step, so it has to be the last.
    steps = _steps(raw.get("pre_tokenizer"))
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or {"ByteLevel", "Metaspace"} & set(kinds[:-1]):
        yield f"pre_tokenizer {kinds} does not end in ByteLevel"
    if any(step.get("add_prefix_space") for step in steps):
        yield "pre_tokenizer with add_prefix_space is not supported"
    for token in raw.get("added_tokens") or ():
        for name in ("lstrip", "rstrip", "single_word", "normalized"):
            if token.get(name) and (name != "normalized" or raw.get("normalizer")):
                yield f"added token {token['content']!r} with {name} is not supported"


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    # The part of the file is absent, one step, or a Sequence of them.
    if part is None:
        return []
    inner = part.get("pretokenizers")
    return [part] if inner is None else [step for sub in inner for step in _steps(sub)]


def parse(raw: Mapping[str, Any]) -> BytePairFile:
    """Return the parts of a `tokenizer.json` of the byte-level BPE kind.

    Raises ValueError, naming the part, for one that is not supported, missing or damaged.
    """
    with damage_named("tokenizer.json"):
        for part in unsupported_parts(raw):
            raise ValueError(part)
        return _parse(raw, raw["model"])


def _parse(raw: Mapping[str, Any], model: Mapping[str, Any]) -> BytePairFile:
    added = tuple(
        AddedToken(token["content"], token["id"], bool(token.get("special")))
        for token in raw.get("added_tokens") or ()
    )
    # All of the library's tokenizer but its vocabulary, in which "a" is the only token.
    parts = {name: raw.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor")}
    library = read_library(parts | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    framed = library.encode("a")
    place = framed.sequence_ids.index(0)
    return BytePairFile(
        vocab=model["vocab"],
        merges=_ranks(model, {token.content for token in added if token.special}),
        added=added,
        normalize=str if library.normalizer is None else library.normalizer.normalize_str,
        split=_splitter(library.pre_tokenizer),
        ignore_merges=bool(model.get("ignore_merges")),
        unknown=model.get("unk_token"),
        prefix_ids=tuple(framed.ids[:place]),
        suffix_ids=tuple(framed.ids[place + 1 :]),
    )


def _splitter(pre_tokenizer: Any) -> Callable[[str], list[str]]:
    def split(text: str) -> list[str]:
        found = pre_tokenizer.pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in found]

    return split


def merge_pairs(merges: Sequence[str | list[str]]) -> list[tuple[str, str]]:
    """Return merges as pairs; files spell them "Ġ t" or ["Ġ", "t"]."""
    # No token holds a space, so one split will do.
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return [(left, right) for left, right in pairs]


def _ranks(model: Mapping[str, Any], special: set[str]) -> dict[tuple[str, str], int]:
    ranks = {pair: rank for rank, pair in enumerate(merge_pairs(model["merges"]))}
    for left, right in ranks:
        if not {left, right, left + right} <= model["vocab"].keys():
            raise ValueError(f"merge {(left, right)} is not of tokens of the vocabulary")
    # Ordinary text must never become a control token, not even by a merge.
    return {pair: rank for pair, rank in ranks.items() if "".join(pair) not in special}
