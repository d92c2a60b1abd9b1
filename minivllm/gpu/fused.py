"""A loaded model changed for a GPU: every sum is made by the norm behind it.

The plain decoder layer ends with `x + mlp(...)`, and the next begins with a norm of that sum. In
between the sum goes to the memory and back, and a launch costs as much as the addition. Leaves
out the layers' parts, which stay what they are. Given (no notebook builds it).

Source: the residual that vLLM's layers pass on beside the hidden states.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minivllm.model import Attend, CausalLM, Decoder


def fuse(model: CausalLM) -> CausalLM:
    """Replace the model's decoder by one with fewer launches, in place; returns the model."""
    # Called like the Decoder that stands there otherwise.
    model.model = FusedDecoder(model.model)  # type: ignore[assignment]
    return model


class FusedDecoder(nn.Module):
    """A decoder with the parts and the results of the one that it was made from."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        # Under the same names: they are those of the checkpoint's weights.
        self.embed_tokens, self.norm = decoder.embed_tokens, decoder.norm
        self.layers: Any = decoder.layers

    def forward(self, input_ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`input_ids [T]`, `cos, sin [T, D/2]` -> `[T, hidden]`, as `Decoder.forward`."""
        x = self.embed_tokens(input_ids)
        normed = self.layers[0].input_layernorm(x)
        for layer, next_norm in zip(self.layers, self.norms_behind()):
            attended = layer.self_attn(normed, cos, sin, attend)
            x, normed = layer.post_attention_layernorm.after_add(x, attended)
            x, normed = next_norm.after_add(x, layer.mlp(normed))
        return normed

    def norms_behind(self) -> list[Any]:
        """For each layer the norm that reads what it gives: the next layer's first, or the last."""
        return [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
