"""A checkpoint of a known model's shape with random weights: its speed without its download.

    python benchmarks/random_checkpoint.py qwen3-0.6b /tmp/qwen3

What the numbers are does not change how long they take to multiply. Its text is nonsense.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minivllm.model_config import ModelConfig
from minivllm.tokenizer import byte_alphabet

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
        "eos_token_id": 151_645,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 128_001,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
        "eos_token_id": 151_645,
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 600,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
}


def write_checkpoint(shape: str, path: Path, dtype: str = "bfloat16") -> Path:
    """Write config, weights and tokenizer of the `shape` into the folder `path`; returns it."""
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is not known; known are {', '.join(SHAPES)}")
    raw = {**SHAPES[shape], "torch_dtype": dtype, "hidden_act": "silu"}
    config = ModelConfig.from_dict(raw)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw, indent=1))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer(config.vocab_size)))
    # Where it is fast: the largest shape has eight billion numbers.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        name: random_tensor(size, getattr(torch, dtype), generator)
        for name, size in tensor_shapes(config)
    }
    save_file(tensors, path / "model.safetensors")
    return path


def random_tensor(
    size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A norm, which has one dimension, as all ones; any other weight at random. On the CPU."""
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    weight = torch.empty(size, dtype=dtype, device=generator.device)
    return weight.normal_(0, 0.02, generator=generator).cpu()


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, for Llama and Qwen3 without biases."""
    hidden = config.hidden_size
    width = config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}self_attn.q_proj.weight", (q_size, hidden)
        yield f"{prefix}self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{prefix}self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, q_size)
        yield f"{prefix}mlp.gate_proj.weight", (width, hidden)
        yield f"{prefix}mlp.up_proj.weight", (width, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, width)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        if config.qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """A `tokenizer.json` of byte-level BPE without merges. Each id from 256 on has a made-up
    text of two or three bytes, so that decoding does its work."""
    letters = list(byte_alphabet())
    vocab = {letter: token_id for token_id, letter in enumerate(letters)}
    for token_id in range(256, vocab_size):
        first = token_id >> 16
        second = token_id >> 8 & 255
        third = token_id & 255
        text = letters[second] + letters[third]
        vocab[letters[first] + text if first else text] = token_id
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"trim_offsets": True},
        "post_processor": None,
        "decoder": byte_level | {"trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    write_checkpoint(arguments.shape, arguments.path, arguments.dtype)


if __name__ == "__main__":
    main()
