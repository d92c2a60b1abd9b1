"""Turn a GGUF file into an ordinary checkpoint directory, so that the engine reads one format.

Handles the Llama architecture with SmolLM's tokenizer and the types of the built-in model, whose
file is pinned by its checksum: nothing else is expected and little is checked. Does not handle
downloads (see `hub`). Needs numpy and gguf, imported when a file is converted and not before.
Not built in the course.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

CONTROL_TOKEN = 3  # GGUF's number for this kind of token

# GGUF's names of modules, and those of a Hugging Face checkpoint.
OUTER_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_MODULES = {
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
    """Write the model in `gguf_path` into `out_dir`, which is made if need be.

    Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
    model.safetensors with all weights as float32, codes.safetensors with the quantized ones as
    they are in the file (`weights.read_codes`), and a README.md that names `source`.
    Half-written files stay when the process dies: the caller renames a finished directory into
    place (`hub` does).
    """
    from gguf import GGUFReader

    print(f"converting {gguf_path.name} (some seconds)", file=sys.stderr, flush=True)
    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    out_dir.mkdir(parents=True, exist_ok=True)
    contents = {
        "config.json": model_config(metadata),
        "generation_config.json": token_ids(metadata),
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": tokenizer_config(metadata),
    }
    for name, content in contents.items():
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (out_dir / name).write_text(text, encoding="utf-8")
    readme = README.format(
        name=gguf_path.name,
        source=source or "no source given",
        licence=metadata.get("general.license", "not stated in the file"),
    )
    (out_dir / "README.md").write_text(readme, encoding="utf-8")
    write_weights(reader, metadata, out_dir)


README = """# {name}, dequantized

Converted by minivllm ({source}). Licence of the model: {licence}.

These are quantized weights, stored in model.safetensors as the float32 values that they encode
and in codes.safetensors as the file has them. They are not the original model's weights: answers
differ from the original's. The `torch_dtype` in config.json is what the original runs in.
"""


# -- configuration --


def model_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json."""
    import numpy as np

    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
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
        # stored as float32 all the same: the exact values that 4-bit weights encode.
        "torch_dtype": "bfloat16",
        **token_ids(metadata),
    }


def token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the special token ids: the content of generation_config.json."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: metadata[f"tokenizer.ggml.{key}_token_id"] for name, key in keys.items()}


# -- tokenizer --


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json: byte-level BPE that cuts words at every digit.

    The vocabulary holds 235 of the 256 bytes. As in the original there is no unknown token, so
    the other 21 (such as \\x04, and \\xf1, which begins unassigned characters) leave no trace.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    byte_level |= {"trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [
            {"id": token_id, "content": tokens[token_id], **flags, "special": True}
            for token_id, kind in enumerate(kinds)
            if kind == CONTROL_TOKEN
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token")),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: chat template, names of the special tokens."""
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


def checkpoint_name(gguf_name: str) -> str:
    """Return the name of a module in the checkpoint: "blk.3.attn_q" is
    "model.layers.3.self_attn.q_proj"."""
    if gguf_name in OUTER_MODULES:
        return OUTER_MODULES[gguf_name]
    _, layer, module = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_MODULES[module]}"


def write_weights(reader: GGUFReader, metadata: Mapping[str, Any], out_dir: Path) -> None:
    """Write model.safetensors and codes.safetensors."""
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights, codes = {}, {}
    for tensor in reader.tensors:
        gguf_name = tensor.name.removesuffix(".weight")
        name = checkpoint_name(gguf_name)
        rows = tensor.data
        if (kind := gguf_name.split(".")[-1]) in heads:
            rows = undo_permutation(rows, heads[kind])
        weights[f"{name}.weight"] = dequantize(rows, tensor.tensor_type)
        for part, array in codes_of(rows, tensor.tensor_type.name).items():
            codes[f"{name}.{part}"] = array
    for file_name, arrays in (("model.safetensors", weights), ("codes.safetensors", codes)):
        save_file(arrays, out_dir / file_name, metadata={"format": "pt"})
        # save_file lets only its owner read.
        shutil.copymode(out_dir / "config.json", out_dir / file_name)


def undo_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows `[H * D, ...]` of a query or key projection, from llama.cpp's order into ours.

    RoPE turns pairs of rows. llama.cpp keeps a pair side by side, a Hugging Face checkpoint half
    a head apart. One head of 4 rows: [a0, b0, a1, b1] -> [a0, a1, b0, b1].
    """
    half = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def codes_of(rows: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """Return "codes" and "scales" of quantized rows `[m, bytes]` in the form of `model.Codes`, the
    scales as float16; nothing for a type without groups of 32.

    A group of Q4_1 is scale and minimum (float16) and 16 bytes of codes, in our order; one of Q8_0
    is a scale and 32 numbers from -128 on.
    """
    import numpy as np

    if kind == "Q4_1":
        groups = rows.reshape(len(rows), -1, 20)
        scales = np.ascontiguousarray(groups[..., :4]).view(np.float16)
        return {"codes": np.ascontiguousarray(groups[..., 4:]), "scales": scales}
    if kind == "Q8_0":
        groups = rows.reshape(len(rows), -1, 34)
        scale = np.ascontiguousarray(groups[..., :2]).view(np.float16)
        scales = np.concatenate((scale, -128 * scale), axis=-1)
        return {"codes": groups[..., 2:] ^ 128, "scales": scales}
    return {}
