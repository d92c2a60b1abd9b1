"""Rules of loading: every tensor finds its place, and what does not fit is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minivllm.checkpoint.weights import load_model, read_codes, read_config
from minivllm.model import CausalLM
from minivllm.model_config import ModelConfig

# 2 query heads and 1 key head of size 2, MLP 3, one layer, 5 tokens: every size differs.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 5,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
LAYER = "model.layers.0."


def tensors() -> dict[str, Tensor]:
    """A whole checkpoint for CONFIG, every element different."""
    shapes = {
        "model.embed_tokens.weight": (5, 4),
        LAYER + "input_layernorm.weight": (4,),
        LAYER + "self_attn.q_proj.weight": (4, 4),
        LAYER + "self_attn.k_proj.weight": (2, 4),
        LAYER + "self_attn.v_proj.weight": (2, 4),
        LAYER + "self_attn.o_proj.weight": (4, 4),
        LAYER + "post_attention_layernorm.weight": (4,),
        LAYER + "mlp.gate_proj.weight": (3, 4),
        LAYER + "mlp.up_proj.weight": (3, 4),
        LAYER + "mlp.down_proj.weight": (4, 3),
        "model.norm.weight": (4,),
        "lm_head.weight": (5, 4),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def save(path: Path, state: dict[str, Tensor], **changes: Any) -> Path:
    """Write `state` and CONFIG with `changes` as a checkpoint directory."""
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


def load(path: Path, dtype: torch.dtype = torch.float32, progress: bool = False) -> Any:
    """Load the checkpoint in `path` on the CPU."""
    config = read_config(path)
    return load_model(path, config, dtype=dtype, device="cpu", max_len=8, progress=progress)


def test_every_tensor_is_copied_to_its_place(tmp_path: Path) -> None:
    """Query, key, value rows follow one another in the merged weight, and gate and up."""
    state = tensors()
    loaded = dict(load(save(tmp_path, state)).named_parameters())
    merged = {
        LAYER + "self_attn.qkv_proj.weight": [
            LAYER + f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")
        ],
        LAYER + "mlp.gate_up_proj.weight": [
            LAYER + f"mlp.{part}_proj.weight" for part in ("gate", "up")
        ],
    }
    for name, parts in merged.items():
        assert torch.equal(loaded.pop(name), torch.cat([state.pop(part) for part in parts])), name
    assert loaded.keys() == state.keys()
    for name, parameter in loaded.items():
        assert torch.equal(parameter, state[name]), name


def test_biases_are_merged_like_their_weights(tmp_path: Path) -> None:
    """Qwen2 has biases on query, key and value alone."""
    state = tensors()
    for part, size in (("q", 4), ("k", 2), ("v", 2)):
        state[LAYER + f"self_attn.{part}_proj.bias"] = torch.randn(size)
    loaded = load(save(tmp_path, state, architectures=["Qwen2ForCausalLM"]))
    expected = torch.cat([state[LAYER + f"self_attn.{part}_proj.bias"] for part in "qkv"])
    assert torch.equal(loaded.model.layers[0].self_attn.qkv_proj.bias, expected)


def test_values_are_converted_to_the_asked_dtype(tmp_path: Path) -> None:
    """A float32 checkpoint loaded as bfloat16 is rounded; the RoPE table stays float32."""
    state = tensors()
    model = load(save(tmp_path, state), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"].bfloat16())
    assert model.cos.dtype == model.sin.dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    """One such number would end every request with an error, or answer with nonsense."""
    state = tensors()
    state[LAYER + "mlp.up_proj.weight"][2, 1] = value
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight .* not finite; download"):
        load(save(tmp_path, state))


def test_a_weight_that_overflows_in_float16_names_dtypes_that_hold_it(tmp_path: Path) -> None:
    """70,000 is above float16's largest number; bfloat16 rounds it."""
    state = tensors()
    state["lm_head.weight"][0, 0] = 70_000
    path = save(tmp_path, state)
    with pytest.raises(ValueError, match=r'lm_head.* too large for .*float16.*"bfloat16"'):
        load(path, torch.float16)
    assert load(path, torch.bfloat16).lm_head.weight[0, 0] > 60_000


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    """Two shards hold what one file holds; a file the index does not name is not read."""
    state = tensors()
    save(tmp_path, state).joinpath("model.safetensors").unlink()
    names = sorted(state)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in ("model-0.safetensors", "model-1.safetensors"):
        save_file({n: state[n] for n in names if weight_map[n] == shard}, tmp_path / shard)
    save_file({"stray": torch.zeros(1)}, tmp_path / "stray.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = load(tmp_path)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-1\.safetensors"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Which of the two counts would depend on the order of the files."""
    save(tmp_path, tensors()).joinpath("model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "b.safetensors")
    index = {"lm_head.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=r"has model\.norm\.weight twice"):
        load(tmp_path)


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}],
)
def test_a_broken_index_is_refused_by_name(tmp_path: Path, index: dict[str, Any]) -> None:
    """No map, an empty one, a list, and a file name that is not a string."""
    save(tmp_path, tensors()).joinpath("model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json has no weight_map"):
        load(tmp_path)


def test_an_index_never_leads_out_of_its_directory(tmp_path: Path) -> None:
    """A shard lies next to its index, and nowhere else."""
    inside, outside = tmp_path / "model", tmp_path / "secret.safetensors"
    inside.mkdir()
    save(inside, tensors()).joinpath("model.safetensors").rename(outside)
    index = {"weight_map": {"lm_head.weight": "../secret.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no weight_map of tensors to file names"):
        load(inside)


@pytest.mark.parametrize("name", sorted(tensors().keys() - {"lm_head.weight"}))
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    """Each in turn, the parts of merged weights included."""
    state = tensors()
    del state[name]
    with pytest.raises(ValueError, match=f"lacks tensors of its model: {name}$"):
        load(save(tmp_path, state))


def test_many_missing_tensors_are_named_up_to_a_limit(tmp_path: Path) -> None:
    """Eleven of twelve are missing: six names and the count of the others."""
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight, .* and 5 more$"):
        load(save(tmp_path, {"lm_head.weight": torch.zeros(5, 4)}))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    """A bias that the config does not ask for would be lost in silence."""
    state = tensors() | {LAYER + "self_attn.q_proj.bias": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bi"):
        load(save(tmp_path, state))


def test_a_layer_too_many_is_named(tmp_path: Path) -> None:
    """Layer 1 of a model whose config says one layer."""
    state = tensors() | {"model.layers.1.input_layernorm.weight": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        load(save(tmp_path, state))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.norm.weight", (3,), (4,)),
        (LAYER + "self_attn.k_proj.weight", (4, 4), (2, 4)),
        (LAYER + "self_attn.k_proj.weight", (1, 4), (2, 4)),
        (LAYER + "mlp.up_proj.weight", (3, 1), (3, 4)),
    ],
)
def test_a_wrong_shape_is_named_with_both_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Shapes that would broadcast, or spill into the neighbour's rows, are refused too."""
    with pytest.raises(ValueError) as error:
        load(save(tmp_path, tensors() | {name: torch.zeros(shape)}))
    message = str(error.value)
    assert name in message and str(list(shape)) in message and str(list(expected)) in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_quantized_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Values without their scales are no weights, 8-bit floats included."""
    state = tensors() | {"model.norm.weight": torch.ones(4).to(dtype)}
    with pytest.raises(ValueError, match=rf"model\.norm\.weight is {dtype}: quantized"):
        load(save(tmp_path, state))


def test_scales_of_a_quantized_checkpoint_are_named(tmp_path: Path) -> None:
    """Also where config.json forgets to say that it is quantized."""
    state = tensors() | {LAYER + "mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(ValueError, match=r"no place for: .*up_proj\.weight_scale_inv"):
        load(save(tmp_path, state))


def test_tied_model_has_no_head_and_ignores_one_in_the_checkpoint(tmp_path: Path) -> None:
    """`lm_head.weight` present although tied: the embedding serves."""
    state = tensors()
    model = load(save(tmp_path, state, tie_word_embeddings=True))
    assert "lm_head.weight" not in dict(model.named_parameters())
    hidden = torch.randn(2, 4)
    torch.testing.assert_close(model.logits(hidden), hidden @ state["model.embed_tokens.weight"].T)


def test_tied_model_needs_no_head_in_the_checkpoint(tmp_path: Path) -> None:
    """Most tied checkpoints leave `lm_head.weight` out; with it, the logits are the same."""
    state, hidden = tensors(), torch.randn(2, 4)
    with_head = load(save(tmp_path, state, tie_word_embeddings=True)).logits(hidden)
    del state["lm_head.weight"]
    assert torch.equal(
        load(save(tmp_path, state, tie_word_embeddings=True)).logits(hidden), with_head
    )


def test_absent_head_of_an_untied_model_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    """Never a head of uninitialised memory."""
    state = tensors()
    del state["lm_head.weight"]
    with pytest.raises(ValueError, match=r"no lm_head\.weight.*set tie_word_embeddings to true"):
        load(save(tmp_path, state))


def test_stored_rope_frequencies_are_ignored(tmp_path: Path) -> None:
    """Old Llama checkpoints carry them; the model computes its own."""
    state = tensors() | {LAYER + "self_attn.rotary_emb.inv_freq": torch.zeros(1)}
    load(save(tmp_path, state))


def test_a_cut_file_is_refused_by_name(tmp_path: Path) -> None:
    """Half a download is not a checkpoint."""
    file = save(tmp_path, tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    """A clone without Git LFS holds a few lines of text where the weights should be."""
    file = save(tmp_path, tensors()) / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 538090408\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is a Git LFS pointer.*git lfs pull"):
        load(tmp_path)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    """A directory with only `pytorch_model.bin` is refused, with the remedy."""
    save(tmp_path, tensors()).joinpath("model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ValueError, match=r"no model\.safetensors.*safe_serialization=True"):
        load(tmp_path)


def test_missing_and_invalid_config_json_are_errors(tmp_path: Path) -> None:
    """The message names the file, and the position where JSON breaks."""
    with pytest.raises(ValueError, match=r"no config\.json; is it a checkpoint"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 5,')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON .*column"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="holds a list, not a JSON object"):
        read_config(tmp_path)


def test_progress_is_drawn_on_stderr_only_where_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar ends at the number of tensors."""
    save(tmp_path, tensors())
    load(tmp_path, progress=False)
    assert capsys.readouterr().err == ""
    load(tmp_path, progress=True)
    seen = capsys.readouterr()
    assert "12/12" in seen.err and seen.out == ""


def test_loading_does_not_import_transformers(tmp_path: Path) -> None:
    """Importing it takes seconds and is not needed."""
    before = "transformers" in sys.modules
    load(save(tmp_path, tensors()))
    assert ("transformers" in sys.modules) == before


def test_codes_go_to_the_products_and_the_embedding(tmp_path: Path) -> None:
    """Merged products get the rows of their parts one after the other; what has none keeps None."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "tie_word_embeddings": True}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = CausalLM(ModelConfig.from_dict(CONFIG | sizes), 8)
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    stored = {"model.embed_tokens": 5} | {f"{LAYER}self_attn.{n}": m for n, m in rows.items()}
    stored[f"{LAYER}mlp.gate_proj"] = 32  # without up_proj: no product
    state = {}
    for seed, (name, count) in enumerate(stored.items()):
        state[f"{name}.codes"] = torch.full((count, 2, 16), seed, dtype=torch.uint8)
        state[f"{name}.scales"] = torch.full((count, 2, 2), seed / 4, dtype=torch.float16)
    save_file(state, tmp_path / "codes.safetensors")
    read_codes(model, tmp_path / "codes.safetensors")
    layer: Any = model.model.layers[0]
    codes, scales = layer.self_attn.qkv_proj.codes
    assert codes[:, 0, 0].tolist() == [1] * 64 + [2] * 32 + [3] * 32
    assert scales.dtype == torch.float32 and scales[64].tolist() == [[0.5, 0.5]] * 2
    assert model.model.embed_tokens.codes.bits == 4
    assert layer.self_attn.o_proj.codes is None and layer.mlp.gate_up_proj.codes is None
