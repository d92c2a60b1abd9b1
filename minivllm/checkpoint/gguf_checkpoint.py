"""Turn a GGUF file into an ordinary checkpoint directory, so that the engine reads one format.

Knows the Llama architecture with SmolLM's tokenizer, which is what the built-in model is, and
refuses every other GGUF by name. Leaves out fetching (`hub`). Needs numpy and gguf, imported
when a file is converted and not before. Given (no notebook builds it).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.waiting import waiting

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

# GGUF's kinds of token, of which this family uses two.
NORMAL_TOKEN = 1
CONTROL_TOKEN = 3

# GGUF's names of tensors, without ".weight", and those of a Hugging Face checkpoint.
OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_path: Path, out_dir: Path, source: str = "") -> None:
    """Write the model in `gguf_path` into `out_dir` as config.json, generation_config.json,
    model.safetensors, tokenizer.json, tokenizer_config.json and a README.md that names
    `source`. Quantized weights are dequantized to float32.

    `out_dir` is made if need be; what it holds is overwritten. Half-written files stay when the
    process dies: the caller renames a finished directory into place (`hub` does).
    Raises ValueError for a GGUF of another architecture, tokenizer or set of tensors.
    """
    print(f"reading {gguf_path.name}", file=sys.stderr, flush=True)
    with waiting("its vocabulary and tensors"):
        from gguf import GGUFReader

        reader = GGUFReader(gguf_path)
        metadata = read_metadata(reader)
    refuse_other_families(metadata, gguf_path.name)
    config = model_config(metadata)
    names = checkpoint_names(reader, config["num_hidden_layers"], gguf_path.name)
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", generation_config(metadata))
    _write_json(out_dir / "tokenizer.json", tokenizer_json(metadata))
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config(metadata))
    readme = _readme(metadata, reader, gguf_path, source)
    (out_dir / "README.md").write_text(readme, encoding="utf-8")
    _write_weights(reader, config, names, out_dir / "model.safetensors")


# -- what the file is --


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """The file's key-value pairs as Python values: `{"llama.block_count": 30, ...}`."""
    return {name: field.contents() for name, field in reader.fields.items()}


def refuse_other_families(metadata: Mapping[str, Any], file_name: str) -> None:
    """Raise ValueError, naming what it found, unless this is a Llama with SmolLM's tokenizer."""
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",  # GGUF's word for byte-level BPE
        "tokenizer.ggml.pre": "smollm",
    }
    found = {key: metadata.get(key) for key in expected}
    scaling = [key for key in metadata if key.startswith("llama.rope.scaling.")]
    if found == expected and not scaling:
        return
    wrong = [f"{key}={found[key]!r}" for key in expected if found[key] != expected[key]]
    raise ValueError(
        f"{file_name}: {', '.join(wrong + scaling)} cannot be converted; only GGUF files of the"
        " SmolLM2 family can (architecture llama, tokenizer smollm, no RoPE scaling). Use the"
        " model's safetensors checkpoint instead"
    )


def checkpoint_names(reader: GGUFReader, num_layers: int, file_name: str) -> dict[str, str]:
    """GGUF tensor name -> checkpoint tensor name, for every tensor of the file.

    "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight".
    Raises ValueError, naming them, if tensors are missing or unknown.
    """
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in OUTER_TENSORS.items()}
    for layer in range(num_layers):
        for ours, theirs in LAYER_TENSORS.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    found = {tensor.name for tensor in reader.tensors}
    if found != set(names):
        raise ValueError(
            f"{file_name}: tensors do not match a Llama with tied embeddings of {num_layers}"
            f" layers; missing: {_some(set(names) - found)}; unknown: {_some(found - set(names))}"
        )
    return names


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "") if names else "none"


# -- configuration --


def model_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json."""
    import numpy as np

    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    if metadata["llama.rope.dimension_count"] != hidden // heads:
        raise ValueError(
            f"llama.rope.dimension_count={metadata['llama.rope.dimension_count']} differs from the"
            f" head size {hidden // heads}: partial rotary embedding is not supported"
        )
    # GGUF keeps 1e-5 as a float32, which reads 9.99999975e-06: take the shortest number that
    # rounds to the same float32.
    eps = float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "rms_norm_eps": eps,
        "rope_theta": metadata["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        # What the original model was trained and is run in. The tensors of this checkpoint are
        # stored as float32 all the same: the exact values that 4-bit weights stand for.
        "torch_dtype": "bfloat16",
        **_token_ids(metadata),
    }


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of generation_config.json: the special token ids."""
    return _token_ids(metadata)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: metadata[f"tokenizer.ggml.{key}_token_id"] for name, key in keys.items()}


# -- tokenizer --


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE whose words are cut at every digit.

    The vocabulary holds 235 of the 256 bytes. As in the original there is no unknown token, so
    the other 21 (such as \\x04, and \\xf1, which begins unassigned characters) leave no trace.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    byte_level |= {"trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, tokens[i]) for i in _control_ids(metadata)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def _control_ids(metadata: Mapping[str, Any]) -> list[int]:
    kinds = metadata["tokenizer.ggml.token_type"]
    odd = set(kinds) - {NORMAL_TOKEN, CONTROL_TOKEN}
    if odd:
        raise ValueError(f"tokens of type {sorted(odd)} are not supported, only 1 and 3")
    return [token_id for token_id, kind in enumerate(kinds) if kind == CONTROL_TOKEN]


def _added_token(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json: the chat template and the special tokens' names."""
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {name: tokens[metadata[f"tokenizer.ggml.{k}_token_id"]] for name, k in keys.items()}
    return {
        # Not GPT2Tokenizer: that one would rebuild the word splitting, without the digit rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        **special,
        "chat_template": metadata["tokenizer.chat_template"],
    }


# -- weights --


def undo_permutation(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows `[H * D, hidden]` of a query or key projection, from llama.cpp's order into ours.

    RoPE turns pairs of rows. llama.cpp keeps a pair side by side, a Hugging Face checkpoint half
    a head apart. One head of 4 rows: [a0, b0, a1, b1] -> [a0, a1, b0, b1].
    """
    half = weights.shape[0] // num_heads // 2
    pairs = weights.reshape(num_heads, half, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _write_weights(
    reader: GGUFReader, config: Mapping[str, Any], names: Mapping[str, str], path: Path
) -> None:
    from safetensors.numpy import save_file
    from tqdm import tqdm

    arrays = {}
    for tensor in tqdm(reader.tensors, desc="dequantizing", unit=" tensors", mininterval=0.5):
        arrays[names[tensor.name]] = _dequantized(tensor, config)
    size = sum(array.nbytes for array in arrays.values())
    with waiting(f"writing {size / 2**20:.0f} MiB of float32 weights"):
        save_file(arrays, path, metadata={"format": "pt"})
    shutil.copymode(path.parent / "config.json", path)  # save_file lets only its owner read


def _dequantized(tensor: ReaderTensor, config: Mapping[str, Any]) -> np.ndarray:
    import numpy as np
    from gguf.quants import dequantize

    array = dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith("attn_q.weight"):
        array = undo_permutation(array, config["num_attention_heads"])
    if tensor.name.endswith("attn_k.weight"):
        array = undo_permutation(array, config["num_key_value_heads"])
    # safetensors writes the memory behind an array as it lies, strides unseen.
    return np.ascontiguousarray(array, dtype=np.float32)


# -- files --


def _readme(metadata: Mapping[str, Any], reader: GGUFReader, path: Path, source: str) -> str:
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()
    stored = ", ".join(f"{count} {kind}" for kind, count in kinds)
    return f"""# {path.stem}, dequantized from {kinds[0][0]}

Converted by minivllm from `{path.name}`{f" ({source})" if source else ""}.
Licence of the model: {metadata.get("general.license", "not stated in the file")}.

These are quantized weights (tensors in the file: {stored}),
stored here as the float32 values that they stand for. They are not the original model's weights:
answers differ from the original's. The `torch_dtype` in config.json is what the original runs in.
"""


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
