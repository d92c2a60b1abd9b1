"""A checkpoint directory of a few kilobytes: a real Llama with random weights, and a tokenizer
whose tokens are the 256 bytes and three control tokens."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from minivllm.tokenizer import byte_alphabet

START, END, STOP = 256, 257, 258
VOCAB_SIZE = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "eos_token_id": END,
}


def make_checkpoint(path: Path, **changes: object) -> Path:
    """Write config, weights and tokenizer into `path`; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, STOP]}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    save_file(_tensors(config), path / "model.safetensors")
    return path


def _tensors(config):
    generator = torch.Generator().manual_seed(0)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv_size = head_dim * config["num_key_value_heads"]
    tensors = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "self_attn.q_proj.weight": (hidden, hidden),
            name + "self_attn.k_proj.weight": (kv_size, hidden),
            name + "self_attn.v_proj.weight": (kv_size, hidden),
            name + "self_attn.o_proj.weight": (hidden, hidden),
            name + "mlp.gate_proj.weight": (width, hidden),
            name + "mlp.up_proj.weight": (width, hidden),
            name + "mlp.down_proj.weight": (hidden, width),
        }
    tensors |= _extra_shapes(config, {name: shape[0] for name, shape in tensors.items()})
    made = {n: torch.randn(shape, generator=generator) * 0.3 for n, shape in tensors.items()}
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
    made["model.norm.weight"] = torch.ones(hidden)
    return made


def _extra_shapes(config, num_rows):
    """What some architectures have besides: biases, norms of the heads, a head of its own."""
    architecture = config["architectures"][0]
    attention_bias = config.get("attention_bias", architecture == "Qwen2ForCausalLM")
    biased = ("q_proj", "k_proj", "v_proj") if attention_bias else ()
    if attention_bias and architecture != "Qwen2ForCausalLM":
        biased += ("o_proj",)
    if config.get("mlp_bias"):
        biased += ("gate_proj", "up_proj", "down_proj")
    found = {
        name.replace("weight", "bias"): (rows,)
        for name, rows in num_rows.items()
        if name.split(".")[-2] in biased
    }
    if architecture == "Qwen3ForCausalLM":
        head_dim = (config["hidden_size"] // config["num_attention_heads"],)
        for layer in range(config["num_hidden_layers"]):
            for norm in ("q_norm", "k_norm"):
                found[f"model.layers.{layer}.self_attn.{norm}.weight"] = head_dim
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], config["hidden_size"])
    return found


def _tokenizer():
    controls = {"<|start|>": START, "<|end|>": END, "<|stop|>": STOP}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, token_id in controls.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"trim_offsets": True},
        "post_processor": None,
        "decoder": byte_level | {"trim_offsets": True},
        "model": {
            "type": "BPE",
            "vocab": {char: byte for byte, char in enumerate(byte_alphabet())} | controls,
            "merges": [],
            "ignore_merges": False,
            "byte_fallback": False,
        },
    }
