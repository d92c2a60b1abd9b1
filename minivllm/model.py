"""The decoder: token ids in, one hidden vector per token out, and logits where asked for.

One model for Llama, Mistral, Qwen2 and Qwen3; the flags of `ModelConfig` are the whole
difference. Tokens of all requests lie flat in one row, without padding: only `attend` knows
which token belongs to which request. Does not handle the key/value cache (see `model_runner`), the
arithmetic (see `ops`) or training. Notebook 05.

Tensor letters: T tokens, N requests, H query heads, K key/value heads, D head dimension,
V vocabulary, I MLP width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from minivllm import ops as torch_ops
from minivllm.model_config import ModelConfig, RopeConfig


class Ops(Protocol):
    """The tensor operations the model is made of.

    Filled by the module `minivllm.ops` (plain torch, its docstrings are the specification) and
    by the kernels of notebook 07 under the same names; `assembly.backends` chooses.
    """

    def embed(self, input_ids: Tensor, weight: Tensor) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def rope_table(
        self, rope: RopeConfig, head_dim: int, max_len: int
    ) -> tuple[Tensor, Tensor]: ...
    def norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]: ...


class Attend(Protocol):
    """Attention of one layer, with everything the model does not know: cache and requests.

    Filled by the runner of notebook 06 with a function that writes `k, v [T, K, D]` into layer
    `layer_index` of its paged cache and lets `q [T, H, D]` attend, scores scaled by 1/sqrt(D).
    Returns `[T, H, D]`.
    """

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


GROUP = 32  # weights of a row that share a scale and a minimum


class Codes(NamedTuple):
    """A weight `[m, n]` as whole numbers, the way that a quantized checkpoint stores it.

    weight = code * scale + minimum; 32 weights of a row are a group, with a scale and a minimum.
    Example: with scale 0.25 and minimum -1, the codes 0, 1, ..., 15 are -1, -0.75, ..., 2.75.
    """

    # uint8 [m, n / 32, 32]: 8 bits each; or [m, n / 32, 16]: 4 bits each, where byte i of a group
    # holds weight i in its lower half and weight 16 + i in its upper half.
    codes: Tensor
    scales: Tensor  # float32 [m, n / 32, 2]: scale and minimum

    @property
    def bits(self) -> int:
        """Bits of a code, 4 or 8."""
        return self.codes.shape[2] // 4


class Linear(nn.Module):
    """`x [T, in] -> [T, out]`; weight `[out, in]`, bias `[out]` where the checkpoint has one.

    `codes` is the weight once more where the checkpoint is quantized; a device's room may put
    another kind of product here that uses them.
    """

    codes: Codes | None = None

    def __init__(self, in_size: int, out_size: int, bias: bool, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = empty_parameter(out_size, in_size)
        self.bias = empty_parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`."""
        return self.ops.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """`input_ids [T] -> [T, hidden]`: row `input_ids[t]` of the weight `[V, hidden]`."""

    codes: Codes | None = None  # as in `Linear`: a tied output layer multiplies with them

    def __init__(self, num_rows: int, size: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = empty_parameter(num_rows, size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """One row of the weight per token."""
        return self.ops.embed(input_ids, self.weight)


class Stream:
    """The residual stream `[T, hidden]`: norms read it, layers add to it.

    `stream + y` only notes y: the norm that reads the stream next makes the sum in the same pass
    over the memory (`ops.add_rms_norm`). Everywhere else it acts like the tensor of the sum.
    Source: the residual that vLLM's layers pass on with the hidden states.
    """

    def __init__(self, total: Tensor, added: Tensor | None = None) -> None:
        self.total = total
        self.added = added

    def __add__(self, y: Tensor) -> Stream:
        return Stream(self.tensor(), y)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    # Python looks operators up in the class, past `__getattr__`.
    def __radd__(self, y: Tensor) -> Stream:
        return self + y

    def __sub__(self, y: Tensor) -> Tensor:
        return self.tensor() - y

    def __mul__(self, y: Tensor | float) -> Tensor:
        return self.tensor() * y

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __len__(self) -> int:
        return len(self.tensor())

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = [x.tensor() if isinstance(x, Stream) else x for x in args]
        return function(*args, **(kwargs or {}))

    def tensor(self) -> Tensor:
        """The sum so far."""
        if self.added is not None:
            self.total = self.total + self.added
            self.added = None
        return self.total

    def normed(self, ops: Ops, weight: Tensor, eps: float) -> Tensor:
        """`ops.rms_norm` of the sum so far, which is made on the way."""
        if self.added is None:
            return ops.rms_norm(self.total, weight, eps)
        self.total, normed = ops.add_rms_norm(self.total, self.added, weight, eps)
        self.added = None
        return normed


class RMSNorm(nn.Module):
    """`x [..., size]` -> the same shape, with root mean square 1 times the weight `[size]`."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = empty_parameter(size)

    def forward(self, x: Tensor | Stream) -> Tensor:
        """Normalise the last axis; see `ops.rms_norm`."""
        if isinstance(x, Stream):
            return x.normed(self.ops, self.weight, self.eps)
        return self.ops.rms_norm(x, self.weight, self.eps)

    # For answers to chapter 05 that were written before there was a `Stream`.
    def after_add(self, x: Tensor | Stream, y: Tensor) -> tuple[Tensor | Stream, Tensor]:
        """`x + y`, and its norm."""
        total = x + y
        return total, self(total)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key/value heads, H / K to each.

    Query head h reads key/value head h // (H / K). With 9 and 3: heads 0, 1, 2 read head 0.
    Source: Ainslie et al. 2023, arXiv 2305.13245.
    """

    def __init__(self, config: ModelConfig, layer_index: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.layer_index = layer_index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, q_size + 2 * kv_size, config.qkv_bias, ops)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias, ops)
        self.q_norm = None
        self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, ops)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, ops)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Project, normalise the heads (Qwen3), rotate, attend, project back.

        `x [T, hidden]`, `cos, sin [T, D/2]` of the tokens' positions -> `[T, hidden]`.
        """
        q, k, v = self.split_heads(self.qkv_proj(x))
        # Values carry content, not position: only queries and keys turn.
        q, k = self.ops.norm_rope(q, k, *self.norm_weights(), cos, sin, self.eps)
        return self.o_proj(attend(self.layer_index, q, k, v).flatten(1))

    def norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights `[D]` of the norms of query and key heads, where the model has them."""
        if self.q_norm is None or self.k_norm is None:
            return None, None
        return self.q_norm.weight, self.k_norm.weight

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, (H + 2K) * D]` -> queries `[T, H, D]`, keys and values `[T, K, D]`, as views.

        The merged row holds all query heads, then all key heads, then all value heads: with
        9 and 3 heads of 64, columns 0-575, 576-767 and 768-959.
        """
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = qkv.unflatten(1, (-1, self.head_dim)).split(sizes, dim=1)
        return q, k, v


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), with gate and up as one product `[T, 2I]`."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        hidden = config.hidden_size
        width = config.intermediate_size
        bias = config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * width, bias, ops)
        self.down_proj = Linear(width, hidden, bias, ops)

    def forward(self, x: Tensor) -> Tensor:
        """`x [T, hidden] -> [T, hidden]`."""
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on a normalised copy and added to what came in (pre-norm)."""

    def __init__(self, config: ModelConfig, layer_index: int, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = Attention(config, layer_index, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = MLP(config, ops)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the stream `x [T, hidden]` plus the outputs of attention and MLP.

        Each of them reads the current stream, normalised; `x` itself is unchanged. Example: if
        attention always returns 1 and the MLP 10, a stream of 5 becomes 16, whatever the norms do.
        """
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, final norm: all but the logits (named `model` in checkpoints)."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ops)
        layers = [DecoderLayer(config, index, ops) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)

    def forward(self, input_ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`input_ids [T]`, `cos, sin [T, D/2]` -> `[T, hidden]` after the final norm."""
        x = Stream(self.embed_tokens(input_ids))
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class CausalLM(nn.Module):
    """A decoder with its logits, for inference: no parameter asks for gradients.

    The weights are allocated but not filled; `weights.load_model` fills them. `max_len` is the
    number of positions the RoPE table covers: no position may reach it.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_len: int,
        *,
        ops: Ops = torch_ops,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.ops = ops
        self.config = config
        # Shapes first ("meta" has no memory), then memory once, in the right type and place.
        with torch.device("meta"):
            self.model = Decoder(config, ops)
            self.lm_head = None
            if not config.tie_word_embeddings:
                self.lm_head = Linear(config.hidden_size, config.vocab_size, False, ops)
        for part in self.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                real = empty_parameter(*parameter.shape, dtype=dtype, device=device)
                setattr(part, name, real)
        # No parameters: the tables stay float32 whatever the dtype of the model.
        cos, sin = ops.rope_table(config.rope, config.head_dim, max_len)
        self.cos = cos.to(device)
        self.sin = sin.to(device)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run `input_ids [T]` at `positions [T]` (0-based, each in its own request).

        Returns the hidden states `[T, hidden]` after the final norm.
        """
        # The angles are the same in all layers: looked up once.
        return self.model(input_ids, self.cos[positions], self.sin[positions], attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token: `hidden [N, hidden]` -> `[N, V]`, in the same dtype.

        `hidden` is the output of `forward`. A token's score is the dot product of `hidden` with its
        row in the output matrix; a model with tied embeddings has no matrix of its own for that
        (Press and Wolf 2017, arXiv 1608.05859). Example: rows [1, 0] and [2, 1], hidden [3, 4] ->
        [3, 10].
        """
        if self.lm_head is None:
            return self.ops.linear(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden)


def empty_parameter(
    *shape: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Parameter:
    """A parameter without gradient whose values are not set yet."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
