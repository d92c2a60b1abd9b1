"""Tensor parallelism: a model cut into shards, one per rank, that compute each step together.

A product whose outputs are cut needs no other rank (column parallel). One whose inputs are cut
computes a part of every sum, and the parts are added up over the ranks (row parallel). Attention
and MLP each have one of both, so a layer needs two sums. Does not handle processes (see
`distributed`) or scheduling (see `leader`). Notebook 09.

Tensor letters: T tokens, N requests, R ranks; H, K, D, V, I as in `model`, of the whole model.

Source: Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minivllm.checkpoint.weights import StoredTensor, Take, load_model
from minivllm.model import GROUP, CausalLM, Codes, Embedding, Linear
from minivllm.model_config import ModelConfig
from minivllm.model_runner import Sample
from minivllm.rows import SamplingRows


class Group(Protocol):
    """The ranks that compute together, seen from one of them.

    Every rank makes the same calls in the same order; each call waits for all ranks. Implemented
    by `distributed.process_group.ProcessGroup`.
    """

    rank: int  # from 0, which is the leader
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x` on each rank; overwrites `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `x [...]` in rank order, `[R, ...]`, on each rank."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the leader's `x` on each rank; overwrites `x`."""


# -- whose part --------------------------------------------------------------------------------


def share_of(total: int, rank: int, size: int) -> range:
    """Return the numbers from 0 to `total` that belong to a rank; `size` must divide `total`.

    Example: of 9 heads, rank 1 of 3 has 3, 4 and 5.
    """
    count = total // size
    return range(rank * count, (rank + 1) * count)


def kv_heads_of(num_kv_heads: int, rank: int, size: int) -> range:
    """Return the key/value heads that the query heads of `rank` (of `size` ranks) read.

    Query heads are divided evenly, in order. One of `num_kv_heads` and `size` divides the other.
    Examples: of 6 heads, rank 1 of 3 holds heads 2 and 3. Of 2 heads, ranks 0 and 1 of 4 hold
    head 0, ranks 2 and 3 hold head 1.
    """
    if num_kv_heads >= size:
        return share_of(num_kv_heads, rank, size)
    head = rank // (size // num_kv_heads)
    return range(head, head + 1)


def padded_vocab_size(vocab_size: int, size: int) -> int:
    """Return the next multiple of `size`, so that each rank has as many rows. 259, 3 -> 261."""
    return -(-vocab_size // size) * size


def fits(config: ModelConfig, size: int) -> bool:
    """Return whether `size` ranks can share the model: `size` divides the query heads and the MLP
    columns, and divides the key/value heads or is a multiple of them."""
    even = config.num_heads % size == 0 and config.intermediate_size % size == 0
    return even and (config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0)


def require_fit(config: ModelConfig, size: int) -> None:
    """Raise ValueError, with the numbers and the sizes that work, unless the model `fits`."""
    if fits(config, size):
        return
    sizes = [str(n) for n in range(1, config.num_heads + 1) if fits(config, n)]
    raise ValueError(
        f"tensor_parallel_size={size} does not divide this model: {config.num_heads} query heads,"
        f" {config.num_kv_heads} key/value heads, {config.intermediate_size} columns in the MLP."
        f" It can be {', '.join(sizes)}"
    )


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the shape of one rank's shard, with every size that is cut divided."""
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=len(kv_heads_of(config.num_kv_heads, 0, size)),
        intermediate_size=config.intermediate_size // size,
        vocab_size=padded_vocab_size(config.vocab_size, size) // size,
    )


# -- the checkpoint ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The entries from `start` to `stop` of a tensor along one dimension of `whole` entries.

    Entries past `whole` are padding.
    """

    dim: int  # 0: rows, 1: columns
    start: int
    stop: int
    whole: int


# Products whose inputs are cut; all others are cut by their outputs.
ROW_PARALLEL = ("o_proj", "down_proj")


def entries_of(module: str, config: ModelConfig, rank: int, size: int) -> tuple[range, int] | None:
    """Return a rank's entries of a module along the dimension that is cut, and the number of all
    entries; None for a module that every rank holds whole.

    Examples: with 9 query heads of 64, rank 1 of 3 has (range(192, 384), 576) of "o_proj". The
    vocabulary is padded: of 259 tokens, rank 2 of 3 has (range(174, 261), 259).
    """
    heads = share_of(config.num_heads, rank, size)
    kv_heads = kv_heads_of(config.num_kv_heads, rank, size)
    columns = share_of(config.intermediate_size, rank, size)
    tokens = share_of(padded_vocab_size(config.vocab_size, size), rank, size)  # and padding
    # modules: this rank's numbers, the number of all, entries per number
    cuts = {
        ("q_proj", "o_proj"): (heads, config.num_heads, config.head_dim),
        ("k_proj", "v_proj"): (kv_heads, config.num_kv_heads, config.head_dim),
        ("gate_proj", "up_proj", "down_proj"): (columns, config.intermediate_size, 1),
        ("embed_tokens", "lm_head"): (tokens, config.vocab_size, 1),
    }
    for modules, (mine, count, each) in cuts.items():
        if module in modules:
            return range(mine.start * each, mine.stop * each), count * each
    return None


def part_of(name: str, config: ModelConfig, rank: int, size: int) -> Part | None:
    """Return the part of the checkpoint's tensor `name` that a rank holds, None for all of it.

    Weights are `[out, in]`. Products whose outputs are heads, MLP columns or tokens are cut by
    output, and so are their biases. Products that read heads or MLP columns (`ROW_PARALLEL`) are
    cut by input, and their biases stay whole. All other tensors stay whole.

    Example, SmolLM2 (9 query and 3 key/value heads of 64), rank 1 of 3: of
    "model.layers.0.self_attn.q_proj.weight" Part(0, 192, 384, 576), of "...k_proj.weight" Part(0,
    64, 128, 192), of "...o_proj.weight" Part(1, 192, 384, 576), of "model.norm.weight" None.
    """
    module, kind = name.split(".")[-2:]
    entries = entries_of(module, config, rank, size)
    is_row_parallel = module in ROW_PARALLEL
    # Such a bias belongs to the sum, not to any rank's part of it.
    if entries is None or (is_row_parallel and kind == "bias"):
        return None
    mine, whole = entries
    return Part(int(is_row_parallel), mine.start, mine.stop, whole)


def cut(tensor: Tensor | StoredTensor, part: Part) -> Tensor:
    """Return the entries of a part, in the tensor's dtype; rows past the tensor's end are zeros.

    A `StoredTensor` is in a file: read only the part, with one slice that begins and ends inside
    the tensor. Only rows are padded. Rows may have any shape. Examples: of 5 rows,
    Part(0, 3, 6, 5) is rows 3 and 4 and a row of zeros, Part(0, 6, 9, 5) three rows of zeros.
    """
    # Both ends stay inside the file, even if all of a rank's tokens are padding.
    entries = slice(min(part.start, part.whole), min(part.stop, part.whole))
    piece = tensor[entries] if part.dim == 0 else tensor[:, entries]
    missing = (part.stop - part.start) - piece.shape[part.dim]
    return torch.cat((piece, piece.new_zeros(missing, *piece.shape[1:]))) if missing else piece


def take_part(config: ModelConfig, rank: int, size: int) -> Take:
    """Return a function for `weights.load_model` that reads only a rank's part of each tensor."""

    def take(name: str, stored: StoredTensor) -> Tensor:
        module, _, kind = name.rpartition(".")
        is_quantized = kind in Codes._fields
        part = part_of(f"{module}.weight" if is_quantized else name, config, rank, size)
        if part is None:
            return stored[:]
        if is_quantized and part.dim == 1:
            part = groups_of(part, size)
        if (found := stored.shape[part.dim]) != part.whole:
            wanted = f"{part.whole} in dimension {part.dim}"
            raise ValueError(f"{name} has {found} entries, but config.json asks for {wanted}")
        return cut(stored, part)

    return take


def groups_of(columns: Part, size: int) -> Part:
    """Return a part of a weight's columns in units of the 32 that share a scale in `Codes`.

    Raises ValueError for a part that begins or ends within a group.
    """
    numbers = (columns.start, columns.stop, columns.whole)
    if any(number % GROUP for number in numbers):
        raise ValueError(
            f"tensor_parallel_size={size} cuts columns {columns.start} to {columns.stop} out of"
            f" {columns.whole}, but quantized weights come in groups of {GROUP}: take fewer ranks"
        )
    return Part(columns.dim, *(number // GROUP for number in numbers))


# -- the layers -------------------------------------------------------------------------------


class RowParallelLinear(nn.Module):
    """A product whose inputs are cut, `x [T, in / R] -> [T, out]`: each rank has some columns of
    the weight, and the entries of `x` that they multiply."""

    def __init__(self, linear: Linear, group: Group) -> None:
        super().__init__()
        self.linear = linear
        self.group = group
        # Removed from the product, or R ranks would add it R times.
        self.bias = linear.bias
        linear.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole product on each rank, bias included: `x [T, in / R]` -> `[T, out]`."""
        total = self.group.all_reduce(self.linear(x))
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Module):
    """`input_ids [T] -> [T, hidden]`: each rank has the rows of some tokens."""

    def __init__(self, embedding: Embedding, group: Group) -> None:
        super().__init__()
        self.embedding = embedding
        self.group = group
        self.num_rows = len(embedding.weight)
        self.start = group.rank * self.num_rows  # the first token that is this rank's

    @property
    def weight(self) -> Tensor:
        """The rows `[V / R, hidden]` of this rank's tokens."""
        return self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the rows of all tokens on each rank: `input_ids [T]` -> `[T, hidden]`.

        `input_ids` are unchanged. Reads no value on the host, so that a CUDA graph can replay it.
        """
        rows = input_ids - self.start
        is_other = (rows < 0) | (rows >= self.num_rows)
        # Tokens of other ranks look up row 0, which is zeroed below.
        x = self.embedding(rows.masked_fill(is_other, 0))
        return self.group.all_reduce(x.masked_fill_(is_other.unsqueeze(1), 0))


class VocabParallelHead(nn.Module):
    """`hidden [N, hidden] -> logits [N, V]`: each rank computes the logits of its own tokens."""

    def __init__(self, linear: Linear, vocab_size: int, group: Group) -> None:
        super().__init__()
        self.linear = linear
        self.vocab_size = vocab_size
        self.group = group

    @property
    def weight(self) -> Tensor:
        """The rows `[V / R, hidden]` of this rank's tokens."""
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of all tokens, without padding, on each rank: `hidden [N, hidden]` ->
        `[N, V]`."""
        parts = self.group.all_gather(self.linear(hidden))  # [R, N, padded V / R]
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]


def load_shard(
    group: Group, path: str | Path, config: ModelConfig, *arguments: Any, **options: Any
) -> CausalLM:
    """Return a rank's shard of the model in the directory `path`, ready to run.

    Arguments and options are those of `weights.load_model`. Loads only this rank's part.
    """
    take = take_part(config, group.rank, group.size)
    shape = shard_config(config, group.size)
    shard = load_model(path, shape, *arguments, take=take, **options)
    return parallelize(shard, config.vocab_size, group)


def parallelize(model: CausalLM, vocab_size: int, group: Group) -> CausalLM:
    """Replace layers so that a rank's shard computes the same as the whole model; returns `model`.

    `model` has the shape `shard_config` and a rank's parts of the weights. Changed in place.
    """
    layers: Any = model.model.layers
    for layer in layers:
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, group)
    embedding: Any = model.model.embed_tokens
    # Called like the modules that they replace.
    head: Any = VocabParallelHead(model.lm_head or tied_head(embedding), vocab_size, group)
    model.model.embed_tokens, model.lm_head = VocabParallelEmbedding(embedding, group), head  # type: ignore[assignment]
    # Heads and columns are this rank's; logits and sampler have all tokens.
    model.config = dataclasses.replace(model.config, vocab_size=vocab_size)
    return model


def tied_head(embedding: Embedding) -> Linear:
    """Return the product that computes logits with the rows of the embedding."""
    num_rows, hidden_size = embedding.weight.shape
    with torch.device("meta"):  # no memory: the embedding has the weight
        head = Linear(hidden_size, num_rows, False, embedding.ops)
    head.weight = embedding.weight
    head.codes = embedding.codes
    return head


def choose_together(sample: Sample, group: Group) -> Sample:
    """Return a sampler that gives all ranks the leader's tokens.

    Ranks that sampled for themselves could disagree, because of rounding or another generator, and
    would then continue with different texts.
    """

    def sample_once(logits: Tensor, settings: SamplingRows, positions: Tensor) -> Tensor:
        if group.rank == 0:
            return group.broadcast(sample(logits, settings, positions))
        return group.broadcast(torch.empty_like(positions))

    return sample_once
