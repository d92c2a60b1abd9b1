"""Make tiny_llama.json: a Llama of 1,400 weights and what transformers computes at every stage.

    python tests/data/make_tiny_llama.py

Weights have two digits behind the point, so the file holds them exactly; what was computed from
them (float32) has six.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

CONFIG: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": True,
}
INPUT_IDS = [3, 1, 4, 1, 5, 9]
STAGES = {  # our word for it: the module of transformers whose result it is
    "embedding": "model.embed_tokens",
    "attention norm": "model.layers.0.input_layernorm",
    "attention": "model.layers.0.self_attn",
    "MLP norm": "model.layers.0.post_attention_layernorm",
    "MLP": "model.layers.0.mlp",
    "layer 0": "model.layers.0",
    "layer 1": "model.layers.1",
    "final norm": "model.norm",
    "logits": "lm_head",
}


def make_model() -> Any:
    """The model, with weights that have two digits behind the point."""
    config = transformers.LlamaConfig(**CONFIG)
    model = transformers.LlamaForCausalLM(config).eval()
    make = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=make) * 0.4 + ("norm" in name)
        weight.data.copy_(torch.tensor(json.loads(json.dumps(rounded(drawn, 2)))))
    return model


def rounded(x: Tensor, digits: int) -> Any:
    """The numbers as lists."""
    if x.dim() == 0:
        return round(x.item(), digits)
    return [rounded(row, digits) for row in x]


@torch.inference_mode()
def stages(model: Any) -> dict[str, Any]:
    """What each stage gives for INPUT_IDS, one row per token."""
    found: dict[str, Any] = {}

    def keep(stage: str) -> Any:
        def hook(module: Any, arguments: Any, result: Any) -> None:
            tensor = result[0] if isinstance(result, tuple) else result
            found[stage] = rounded(tensor.view(len(INPUT_IDS), -1), 6)

        return hook

    hooks = [
        model.get_submodule(name).register_forward_hook(keep(stage))
        for stage, name in STAGES.items()
    ]
    model(torch.tensor([INPUT_IDS]))
    for hook in hooks:
        hook.remove()
    return found


def main() -> None:
    """Write the file."""
    model = make_model()
    content = {
        "made_by": "python tests/data/make_tiny_llama.py",
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "config": CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "weights": {name: rounded(weight, 2) for name, weight in model.named_parameters()},
        "input_ids": INPUT_IDS,
        "stages": stages(model),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path = Path(__file__).with_name("tiny_llama.json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
