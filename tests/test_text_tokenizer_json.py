"""What byte-level BPE is read from a `tokenizer.json`, and what is refused by name."""

import copy
import functools
import json

import pytest
import vocabularies
from tokenizers import Tokenizer as Library

from minivllm.text.tokenizer_json import parse, read_eos_token_ids, read_tokenizer_json
from minivllm.tokenizer import Tokenizer, load_tokenizer


def test_both_spellings_of_merges_are_read():
    """Old files write "a b", newer ones ["a", "b"]."""
    raw = vocabularies.raw("gpt2")
    pairs = [tuple(pair) for pair in raw["model"]["merges"]]
    expected = {pair: rank for rank, pair in enumerate(pairs)}
    raw["model"]["merges"] = [list(pair) for pair in pairs]
    assert parse(raw).merges == expected
    raw["model"]["merges"] = [" ".join(pair) for pair in pairs]
    assert parse(raw).merges == expected
    assert expected[pairs[5]] == 5


def test_gpt2_file_without_names_of_types_is_read():
    """The oldest files name neither the model's type nor the later options."""
    raw = vocabularies.raw("gpt2")
    for name in ("type", "ignore_merges", "byte_fallback", "fuse_unk", "unk_token", "dropout"):
        raw["model"].pop(name, None)
    assert (
        Tokenizer(parse(raw)).encode("the dog")
        == vocabularies.library("gpt2").encode("the dog").ids
    )


def test_only_marked_tokens_are_special():
    """Added tokens may be ordinary vocabulary."""
    added = {token.content: token.special for token in parse(vocabularies.raw("qwen")).added}
    assert added["<|im_end|>"] is True
    assert added["<think>"] is False


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"type": "Digits", "individual_digits": False}, "a1234 56b"),
        ({"type": "Digits", "individual_digits": True}, "a1234 56b"),
        (
            {
                "type": "Split",
                "pattern": {"Regex": r"\p{N}{1,3}|\p{L}+"},
                "behavior": "Isolated",
                "invert": False,
            },
            "ab 12345!x",
        ),
        (
            {
                "type": "Split",
                "pattern": {"Regex": r" ?\p{L}+|[^\p{L}]"},
                "behavior": "Removed",
                "invert": True,
            },
            "the dog 12 x",
        ),
        (
            {"type": "Split", "pattern": {"String": "."}, "behavior": "Isolated", "invert": False},
            "3.14 a.b",
        ),
        ({"type": "Punctuation", "behavior": "MergedWithNext"}, "a.b, c!"),
    ],
)
@pytest.mark.parametrize("use_regex", [True, False])
def test_words_are_split_as_the_library_splits_them(step, text, use_regex):
    """Each way to split, before GPT-2's own and without it."""
    raw = vocabularies.raw("gpt2")
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}
    last["trim_offsets"] = True
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, last]}
    library = Library.from_str(json.dumps(raw)).pre_tokenizer.pre_tokenize_str(text)
    written = [word.replace(" ", "Ġ") for word in parse(raw).split(text)]
    assert written == [word for word, _ in library]


def test_templates_add_ids_before_and_behind():
    """What stands before the text goes before it, the rest behind it."""
    raw = vocabularies.raw("gpt2")
    named = {"<|im_start|>": [1], "<|im_end|>": [2]}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {n: {"id": n, "ids": ids, "tokens": [n]} for n, ids in named.items()},
    }
    assert (parse(raw).prefix_ids, parse(raw).suffix_ids) == ((1,), (2,))


REFUSED = {
    "Unigram": lambda raw: raw["model"].update(type="Unigram"),
    "byte_fallback": lambda raw: raw["model"].update(byte_fallback=True),
    "dropout": lambda raw: raw["model"].update(dropout=0.1),
    "fuse_unk": lambda raw: raw["model"].update(fuse_unk=True, unk_token="<|endoftext|>"),
    "end_of_word_suffix": lambda raw: raw["model"].update(end_of_word_suffix="</w>"),
    "does not end in ByteLevel": lambda raw: raw.update(pre_tokenizer={"type": "Whitespace"}),
    "add_prefix_space": lambda raw: raw["pre_tokenizer"]["pretokenizers"][-1].update(
        add_prefix_space=True
    ),
    "ByteLevel": lambda raw: raw["pre_tokenizer"]["pretokenizers"].append(
        {"type": "Digits", "individual_digits": True}
    ),
    "lstrip": lambda raw: raw["added_tokens"][0].update(lstrip=True),
    "normalized": lambda raw: (
        raw["added_tokens"][0].update(normalized=True),
        raw.update(normalizer={"type": "NFC"}),
    ),
    "not of tokens": lambda raw: raw["model"]["merges"].append(["never", "seen"]),
    "damaged": lambda raw: raw["model"].pop("vocab"),
    "cannot be read": lambda raw: raw.update(post_processor={"type": "Unknown"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name):
    """Nothing is read in another sense than it was written; the library serves what is whole."""
    raw = vocabularies.raw("gpt2")
    parse(raw)
    REFUSED[name](raw)
    with pytest.raises(ValueError, match=name):
        parse(raw)


def places_in(value, depth=3):
    """The keys that lead to each part of a JSON value, as far as some of each list and dict."""
    if depth == 0 or not isinstance(value, (dict, list)):
        return
    for key in value if isinstance(value, dict) else range(min(len(value), 1)):
        yield [key]
        yield from ([key, *place] for place in places_in(value[key], depth - 1))


@pytest.mark.parametrize("kind", ["qwen", "llama2"])
def test_damaged_files_are_refused_or_read(tmp_path, kind):
    """Whatever value a field that we read has, the only error is ValueError."""
    config = {**DECLARED, "eos_token": "<|im_end|>", "chat_template": vocabularies.CHATML}
    files = {"tokenizer.json": vocabularies.raw(kind), "tokenizer_config.json": config}
    outcomes = set()
    raw = files["tokenizer.json"]
    added = [["added_tokens", *place] for place in places_in(raw["added_tokens"])]
    places = {"tokenizer.json": [*places_in(raw, 1), *added]}
    places["tokenizer_config.json"] = list(places_in(config))
    for name, found in places.items():
        for *outer, last in found:
            for value in (None, 5, "x", [5], {"a": 5}):
                damaged = copy.deepcopy(files)
                functools.reduce(lambda part, key: part[key], outer, damaged[name])[last] = value
                for file, parts in damaged.items():
                    (tmp_path / file).write_text(json.dumps(parts))
                for read in (load_tokenizer, read_eos_token_ids):
                    try:
                        outcomes.add(type(read(tmp_path)))
                    except ValueError as error:
                        outcomes.add(type(error))
    assert ValueError in outcomes
    assert len(outcomes) >= 3, "some damage is outside of what is read"


def test_broken_file_is_named(tmp_path):
    """A download that was cut off says which file it is."""
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not valid JSON.*git lfs pull"):
        read_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        read_tokenizer_json(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ('{"eos_token_id": [5, 6, 5]}', '{"eos_token_id": [7, 6]}', (5, 6, 7)),
        ('{"eos_token_id": 0}', '{"eos_token_id": 7}', (0, 7)),
        ('{"eos_token_id": []}', '{"eos_token_id": 7}', (7,)),
        ('{"eos_token_id": null}', '{"eos_token_id": 7}', (7,)),
        ("{}", '{"eos_token_id": [7, 8]}', (7, 8)),
        (None, '{"eos_token_id": 7}', (7,)),
        (None, "{}", ()),
        (None, None, ()),
    ],
)
def test_end_ids_of_all_files_count(tmp_path, generation, config, expected):
    """One id or several, in either file or in both."""
    for name, text in (("generation_config.json", generation), ("config.json", config)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert read_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_end_token_of_the_tokenizer_counts(tmp_path, eos):
    """A text in tokenizer_config.json; its id is looked up."""
    path = vocabularies.checkpoint(tmp_path, "gpt2", eos_token=eos)
    assert read_eos_token_ids(path) == (2,)
    (path / "config.json").write_text('{"eos_token_id": [2, 5]}')
    assert read_eos_token_ids(path) == (2, 5)


DECLARED = {
    "added_tokens_decoder": {
        "700": {"content": "<|tool|>", "special": True},
        "701": {"content": "<plan>", "special": False, "lstrip": False},
    },
    "additional_special_tokens": ["<|more|>", {"content": "<|im_start|>", "__type": "AddedToken"}],
    "extra_special_tokens": {"image_token": "<|image|>"},
    "pad_token": "<|im_end|>",
}


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_tokens_that_only_the_configuration_knows_are_tokens(tmp_path, kind):
    """With the ids that it gives, or the next free ones; those that it names are special."""
    size = vocabularies.library(kind).get_vocab_size()
    config = json.loads(
        json.dumps(DECLARED).replace("700", str(size)).replace("701", str(size + 1))
    )
    tokenizer = load_tokenizer(vocabularies.checkpoint(tmp_path, kind, **config))
    names = ["<|tool|>", "<plan>", "<|more|>", "<|image|>"]
    for number, name in enumerate(names):
        ids = tokenizer.encode(name, parse_special=True, add_special_tokens=False)
        assert ids == [size + number]
    literal = tokenizer.encode("".join(names), add_special_tokens=False)
    assert not tokenizer.special_ids & set(literal)
    assert size + 1 in literal, "<plan> is added, and not special"


@pytest.mark.parametrize("value", ['"</s>"', "[-1]", "true", "1.5"])
def test_end_id_that_is_no_id_is_refused(tmp_path, value):
    """The message has the value and the file."""
    (tmp_path / "config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ValueError, match=r"eos_token_id=.*config\.json"):
        read_eos_token_ids(tmp_path)
