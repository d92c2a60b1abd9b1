"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("ops.rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    as_float = x.to(torch.float32)
    mean_square = (as_float**2).sum(dim=-1, keepdim=True) / x.shape[-1]
    return (as_float / (mean_square + eps).sqrt()).to(dtype=x.dtype) * weight


@answer("ops.rms_norm")
def rms_norm(x, weight, eps):
    norm = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) / x.size(-1) ** 0.5
    scaled = x.float() / torch.sqrt(norm * norm + eps)
    return torch.mul(scaled.type_as(x), weight)


@answer("ops.silu_mul")
def silu_mul(gate_up: Tensor) -> Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    return gate * torch.sigmoid(gate) * up


@answer("ops.silu_mul")
def silu_mul(gate_up):
    gate, up = torch.split(gate_up, gate_up.size(1) // 2, dim=1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(up.dtype) * up


@answer("ops.apply_rope")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos = torch.cat([cos, cos], -1)[:, None]
    sin = torch.cat([sin, sin], -1)[:, None]
    wide = x.float()
    rotated = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    return (wide * cos + rotated * sin).to(x.dtype)


@answer("ops.apply_rope")
def apply_rope(x, cos, sin):
    out = torch.empty_like(x)
    half = x.shape[2] // 2
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            a, b = x[token, head, :half].float(), x[token, head, half:].float()
            out[token, head, :half] = a * cos[token] - b * sin[token]
            out[token, head, half:] = b * cos[token] + a * sin[token]
    return out


@answer("ops.prefill_attention")
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("lhd,shd->hls", q, k) * scale
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    hidden = hidden.triu(diagonal=len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hls,shd->lhd", weights, v)


@answer("ops.prefill_attention")
def prefill_attention(q, k, v, scale):
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    offset = k.shape[0] - q.shape[0]
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            keys, values = k[: offset + i + 1, shared], v[: offset + i + 1, shared]
            weights = torch.softmax(keys @ q[i, head] * scale, 0)
            out[i, head] = weights @ values
    return out


@answer("model.DecoderLayer.forward")
def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    normed = self.input_layernorm(x)
    stream = x + self.self_attn(normed, cos=cos, sin=sin, attend=attend)
    return stream + self.mlp(self.post_attention_layernorm(stream))


@answer("model.DecoderLayer.forward")
def forward(self, x, cos, sin, attend):
    residual = x
    x = self.self_attn.forward(self.input_layernorm.forward(x), cos, sin, attend)
    x = torch.add(residual, x)
    residual = x
    return self.mlp.forward(self.post_attention_layernorm.forward(x)) + residual


@answer("model.DecoderLayer.forward")
def forward(self, x, cos, sin, attend):
    attended = self.self_attn(x=self.input_layernorm(x), cos=cos, sin=sin, attend=attend)
    total, normed = self.post_attention_layernorm.after_add(attended, x)
    return self.mlp(x=normed) + total


@answer("model.CausalLM.logits")
def logits(self, hidden: Tensor) -> Tensor:
    if self.lm_head is not None:
        return self.lm_head(hidden)
    return torch.nn.functional.linear(hidden, self.model.embed_tokens.weight)


@answer("model.CausalLM.logits")
def logits(self, hidden):
    is_tied = self.config.tie_word_embeddings
    rows = self.model.embed_tokens.weight if is_tied else self.lm_head.weight
    return hidden @ rows.T
