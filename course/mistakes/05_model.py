"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/ops.py` and
`minivllm/model.py`. Above each stands the rule of the lesson that the answer breaks.
"""

# -- rms_norm --


# rule 1
@mistake("ops.rms_norm", "[3, 4] keeps its direction: do you subtract the mean, as LayerNorm does?")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


# rule 1
@mistake("ops.rms_norm", "the root of 1 + 3 is 2: is eps below the root?")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    root = wide.square().mean(-1, keepdim=True).sqrt()
    return weight * (wide / (root + eps)).to(x.dtype)


# rule 1
@mistake("ops.rms_norm", "the root of 1 + 3 is 2: is eps below the root?")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1) + eps)).to(x.dtype)


# rule 2
@mistake("ops.rms_norm", "300 squared is infinite in float16: do you compute in float32?")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


# rule 2
@mistake(
    "ops.rms_norm", "1.1328 times 1.5: do you round to bfloat16 before the weight, or after it?"
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * wide * scale).to(x.dtype)


# rule 2
@mistake("ops.rms_norm", "x is only read: in float32, is x.float() a copy?")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide *= torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


# -- apply_rope --


# rule 3
@mistake(
    "ops.apply_rope",
    "element 0 turns with element 2, half a head away: do you pair neighbours?",
)
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float()[..., 0::2], x.float()[..., 1::2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


# rule 3
@mistake("ops.apply_rope", "a quarter turn takes [1, 0] to [0, 1]: has each sine its sign?")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    first = first * cos - second * sin
    second = second * cos + first * sin
    return torch.cat((first, second), dim=-1).to(x.dtype)


# rule 3
@mistake("ops.apply_rope", "a quarter turn takes [1, 0] to [0, 1]: has each sine its sign?")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


# rule 2
@mistake("ops.apply_rope", "the products are float32: do you round cos and sin?")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# rule 3
@mistake("ops.apply_rope", "a quarter turn takes [1, 0] to [0, 1]: has each sine its sign?")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(x.dtype)


# rule 3
@mistake("ops.apply_rope", "x is only read: is x.float() a copy in float32?")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wide, half = x.float(), x.shape[-1] // 2
    first = wide[..., :half].clone()
    wide[..., :half] = first * cos - wide[..., half:] * sin
    wide[..., half:] = wide[..., half:] * cos + first * sin
    return wide.to(x.dtype)


# -- silu_mul --


# rule 4
@mistake("ops.silu_mul", "the gates are 0 and 2, the ups 5 and 3: which half goes through silu?")
def silu_mul(gate_up: Tensor) -> Tensor:
    up, gate = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


# rule 4
@mistake("ops.silu_mul", "the gates are 0 and 2, the ups 5 and 3: which half goes through silu?")
def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.sigmoid(gate) * up


# rule 5
@mistake("ops.silu_mul", "does infinity divided by infinity stand there?")
def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * gate.exp() / (1 + gate.exp()) * up


# -- prefill_attention --


# rule 5
@mistake(
    "ops.prefill_attention",
    "token 0 sees itself alone, token 2 all three: what hides the later ones?",
)
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


# rule 5
@mistake(
    "ops.prefill_attention",
    "scores 0 and log 3 weigh 1/4 and 3/4: is the softmax over the keys?",
)
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


# rule 6
@mistake(
    "ops.prefill_attention",
    "heads 0 and 1 read KV head 0, heads 2 and 3 head 1: h // 2 or h % 2?",
)
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, groups, 1), v.repeat(1, groups, 1)
    scores = torch.einsum("lhd,shd->hls", q, k) * scale
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hls,shd->lhd", weights, v)


# rule 5
@mistake(
    "ops.prefill_attention", "0.5 times log 9 is log 3: is the scale of the argument in the score?"
)
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("lhd,shd->hls", q, k)
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hls,shd->lhd", weights, v)


# rule 6
@mistake("ops.prefill_attention", "do you multiply the scale into one of them in place?")
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q *= scale
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2)
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(len(k[0]) - len(q) + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1)


# rule 2
@mistake("ops.prefill_attention", "the dtype of q comes back: where do you leave float32?")
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(len(k[0]) - len(q) + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1)


# -- DecoderLayer.forward --


# rule 7
@mistake("model.DecoderLayer.forward", "5 + 1 + 10: is each part added to the stream, and once?")
def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    x = self.self_attn(self.input_layernorm(x), cos, sin, attend)
    return x + self.mlp(self.post_attention_layernorm(x))


# rule 7
@mistake("model.DecoderLayer.forward", "5 + 1 + 10: is each part added to the stream, and once?")
def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    x = self.input_layernorm(x)
    x = x + self.self_attn(x, cos, sin, attend)
    x = self.post_attention_layernorm(x)
    return x + self.mlp(x)


# rule 7
@mistake(
    "model.DecoderLayer.forward",
    "the MLP comes after attention: does it read the stream with attention in it, normalised?",
)
def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    attended = self.self_attn(self.input_layernorm(x), cos, sin, attend)
    return x + attended + self.mlp(self.post_attention_layernorm(x))


# rule 7
@mistake("model.DecoderLayer.forward", "x is not yours to change: do you write x += ...?")
def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    x += self.self_attn(self.input_layernorm(x), cos, sin, attend)
    x += self.mlp(self.post_attention_layernorm(x))
    return x


# rule 2
@mistake("model.DecoderLayer.forward", "the stream is bfloat16: where does it become float32?")
def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    x = x.float() + self.self_attn(self.input_layernorm(x), cos, sin, attend)
    return x + self.mlp(self.post_attention_layernorm(x))


# -- CausalLM.logits --


# rule 8
@mistake("model.CausalLM.logits", "this checkpoint has an lm_head: do you ask whether it is there?")
def logits(self, hidden: Tensor) -> Tensor:
    return self.ops.linear(hidden, self.model.embed_tokens.weight)


# rule 8
@mistake(
    "model.CausalLM.logits",
    "one row of the embedding per token, as it is: scores, of rows and not of columns?",
)
def logits(self, hidden: Tensor) -> Tensor:
    if self.lm_head is None:
        return hidden @ self.model.embed_tokens.weight
    return self.lm_head(hidden)


# rule 8
@mistake("model.CausalLM.logits", "one row of the embedding per token, as it is: scores")
def logits(self, hidden: Tensor) -> Tensor:
    hidden = self.model.norm(hidden)
    if self.lm_head is None:
        return self.ops.linear(hidden, self.model.embed_tokens.weight)
    return self.lm_head(hidden)
