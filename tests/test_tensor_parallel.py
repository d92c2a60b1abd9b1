"""Shards: which rank holds which part, sums of parts, the same calls on every rank."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from device_watch import question_of
from meeting import Apart, together

from minivllm import ops
from minivllm.model import Embedding, Linear
from minivllm.model_config import ModelConfig
from minivllm.tensor_parallel import (
    Part,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    choose_together,
    cut,
    entries_of,
    fits,
    kv_heads_of,
    padded_vocab_size,
    part_of,
    require_fit,
    shard_config,
    share_of,
    take_part,
)

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def make_config(**changes):
    """SmolLM2's shape, or one that differs from it."""
    return ModelConfig.from_dict(SMOLLM2 | changes)


def on_all_ranks(size, function):
    """Return the results by rank, or how the ranks' calls differed."""
    try:
        return together(size, function), None
    except Apart as apart:
        return None, str(apart)


# -- whose heads --


@pytest.mark.exercise("tensor_parallel.kv_heads_of")
def test_each_rank_has_its_share_of_the_heads():
    """As many key/value heads as ranks, or more."""
    heads = [list(kv_heads_of(3, rank, 3)) for rank in range(3)]
    assert heads == [[0], [1], [2]], "3 heads for 3 ranks: does each have one of its own?"
    heads = [list(kv_heads_of(8, rank, 2)) for rank in range(2)]
    assert heads == [[0, 1, 2, 3], [4, 5, 6, 7]], "8 heads for 2 ranks: does each have 4 in a row?"


@pytest.mark.exercise("tensor_parallel.kv_heads_of")
def test_neighbours_hold_the_head_that_their_queries_read():
    """Query head h reads head h // (H / K), so neighbouring ranks share one."""
    heads = [list(kv_heads_of(2, rank, 4)) for rank in range(4)]
    assert [len(mine) for mine in heads] == [1, 1, 1, 1], (
        "2 heads for 4 ranks: does every rank have one head?"
    )
    assert heads == [[0], [0], [1], [1]], (
        "the first half of the query heads, on ranks 0 and 1, reads head 0: do both hold it?"
    )
    heads = [list(kv_heads_of(1, rank, 3)) for rank in range(3)]
    assert heads == [[0], [0], [0]], "one head for 3 ranks: does each of them hold it?"
    shared = kv_heads_of(2, 1, 4)
    assert isinstance(shared, range), "2 heads for 4 ranks: is the result a range here too?"


@pytest.mark.exercise("tensor_parallel.kv_heads_of")
def test_four_ranks_share_eight_heads_in_order():
    """The numbers are a range, because `entries_of` reads its ends."""
    heads = [kv_heads_of(8, rank, 4) for rank in range(4)]
    assert [list(mine) for mine in heads] == [[0, 1], [2, 3], [4, 5], [6, 7]], (
        "8 heads for 4 ranks: do neighbours stay together?"
    )
    assert all(isinstance(mine, range) for mine in heads), "is the result a range?"


def test_shares_are_disjoint_and_complete():
    """In the order of the ranks."""
    shares = [share_of(12, rank, 3) for rank in range(3)]
    assert [number for share in shares for number in share] == list(range(12))


@pytest.mark.parametrize(("size", "expected"), [(1, 259), (2, 260), (3, 261), (4, 260), (7, 259)])
def test_the_vocabulary_is_padded_to_a_multiple(size, expected):
    """Padding stops at the next multiple of the number of ranks."""
    assert padded_vocab_size(259, size) == expected


@pytest.mark.parametrize(("heads", "kv_heads", "sizes"), [(9, 3, [1, 3]), (8, 2, [1, 2, 4, 8])])
def test_sizes_that_fit(heads, kv_heads, sizes):
    """Query heads divide evenly; key/value heads divide, or are shared evenly."""
    config = make_config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64)
    assert [size for size in range(1, 10) if fits(config, size)] == sizes


def test_a_size_that_does_not_fit_is_refused_with_sizes_that_do():
    """The message also has the numbers that don't divide."""
    with pytest.raises(ValueError, match=r"=2 .* 9 query heads, 3 key/value heads.* be 1, 3$"):
        require_fit(make_config(), 2)
    require_fit(make_config(), 3)


def test_a_shard_has_the_shape_of_its_parts():
    """Heads, columns and tokens are cut, hidden states are not."""
    shape = shard_config(make_config(vocab_size=49151), 3)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (3, 1, 64)
    assert (shape.intermediate_size, shape.vocab_size, shape.hidden_size) == (512, 16384, 576)


# -- which part of a tensor --

LAYER = "model.layers.4."


@pytest.mark.exercise("tensor_parallel.part_of")
def test_products_are_cut_by_their_outputs():
    """Rows of the weight: dimension 0."""
    config = make_config()
    part = part_of(LAYER + "self_attn.q_proj.weight", config, 1, 3)
    assert part is not None, "rank 1 of 3 computes a third of the query heads: is q_proj cut?"
    assert part == Part(0, 192, 384, 576), (
        "a weight is [out, in], and q_proj outputs heads: does rank 1 have rows 192-383?"
    )
    assert part_of(LAYER + "self_attn.v_proj.weight", config, 2, 3) == Part(0, 128, 192, 192), (
        "rank 2 has the last of 3 value heads, each with 64 rows: what does entries_of return?"
    )
    assert part_of(LAYER + "mlp.up_proj.weight", config, 0, 3) == Part(0, 0, 512, 1536), (
        "up_proj outputs the columns of the MLP: does rank 0 have the first 512 rows?"
    )


@pytest.mark.exercise("tensor_parallel.part_of")
def test_products_that_read_the_parts_are_cut_by_their_inputs():
    """Columns of the weight, dimension 1: the same numbers as the outputs before."""
    config = make_config()
    part = part_of(LAYER + "self_attn.o_proj.weight", config, 1, 3)
    assert part == Part(1, 192, 384, 576), (
        "rank 1 has heads 3-5, and o_proj reads them: are its columns of these heads on rank 1"
        " (dimension 1)?"
    )
    part = part_of(LAYER + "mlp.down_proj.weight", config, 2, 3)
    assert part == Part(1, 1024, 1536, 1536), (
        "down_proj reads the outputs of gate and up: does rank 2 hold its last 512 columns?"
    )


@pytest.mark.exercise("tensor_parallel.part_of")
def test_a_bias_goes_with_the_outputs():
    """It has one dimension. Every rank holds all of a row-parallel product's bias."""
    config = make_config(attention_bias=True, mlp_bias=True)
    part = part_of(LAYER + "self_attn.q_proj.bias", config, 1, 3)
    assert part == Part(0, 192, 384, 576), (
        "rank 1 computes outputs 192-383 of q_proj: does it hold their biases?"
    )
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        assert part_of(LAYER + name, config, 1, 3) is None, (
            "o_proj and down_proj are summed over all ranks: does each rank hold the whole bias?"
        )


@pytest.mark.exercise("tensor_parallel.part_of")
def test_norms_are_held_by_every_rank():
    """They normalize hidden states, which all ranks have whole."""
    for name in ("model.norm.weight", LAYER + "input_layernorm.weight"):
        assert part_of(name, make_config(), 1, 3) is None, "a norm isn't cut: is the result None?"


@pytest.mark.exercise("tensor_parallel.part_of")
def test_embedding_and_head_are_cut_by_tokens():
    """The last rank's part includes the padding."""
    config = make_config(vocab_size=259)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert part_of(name, config, 2, 3) == Part(0, 174, 261, 259), (
            "259 tokens, padded to 261 for 3 ranks: does the part end at 261, and is whole 259?"
        )


@pytest.mark.exercise("tensor_parallel.part_of")
def test_ranks_that_share_a_head_hold_the_same_part():
    """Two key/value heads of 64 on four ranks."""
    config = make_config(num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    parts = [part_of(LAYER + "self_attn.k_proj.weight", config, rank, 4) for rank in range(4)]
    first, second = Part(0, 0, 64, 128), Part(0, 64, 128, 128)
    assert parts == [first, first, second, second], (
        "2 heads for 4 ranks: do ranks 0 and 1 hold head 0, and ranks 2 and 3 head 1?"
    )


def test_entries_of_all_ranks_make_the_whole():
    """This holds while no head is shared."""
    config = make_config()
    for module in ("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens"):
        parts = [entries_of(module, config, rank, 3) for rank in range(3)]
        mine = [number for entries, _ in parts for number in entries]
        assert mine == list(range(parts[0][1])), module
    assert entries_of("input_layernorm", config, 0, 3) is None


# -- reading it --


class Stored:
    """A tensor in a file: refuses to read past its ends, and counts the numbers read."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.num_read = tensor, tuple(tensor.shape), 0

    def __getitem__(self, index):
        for part, size in zip(index if isinstance(index, tuple) else (index,), self.shape):
            for end in (part.start, part.stop):
                if end is not None and not 0 <= end <= size:
                    raise IndexError(f"entry {end} is not in a file of {size}")
        piece = self.tensor[index]
        self.num_read += piece.numel()
        return piece.clone()


GRID = torch.arange(20.0).view(5, 4)


@pytest.mark.exercise("tensor_parallel.cut")
def test_rows_and_columns_are_cut():
    """Dimension 0 and dimension 1."""
    rows = cut(Stored(GRID), Part(0, 1, 3, 5))
    assert rows.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]], "dimension 0: rows 1 and 2"
    columns = cut(Stored(GRID), Part(1, 2, 4, 4))
    assert columns.tolist() == [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19]], (
        "dimension 1: columns 2 and 3 of every row"
    )
    assert cut(Stored(GRID[:, 0]), Part(0, 3, 5, 5)).tolist() == [12, 16], "a bias has only rows"


@pytest.mark.exercise("tensor_parallel.cut")
def test_padding_is_zeros_after_the_last_row():
    """All ranks' parts have the same shape."""
    piece = cut(Stored(GRID), Part(0, 3, 6, 5))
    assert piece.shape == (3, 4), "rows 3 to 5 of a file with 5: is a row of zeros added?"
    assert piece.tolist() == [[12, 13, 14, 15], [16, 17, 18, 19], [0, 0, 0, 0]], (
        "rows 3 and 4, then a row of zeros: which values come after the last row?"
    )


@pytest.mark.exercise("tensor_parallel.cut")
def test_a_part_may_be_padding_alone():
    """Five tokens for three ranks with three rows each leave none for the last rank."""
    piece = cut(Stored(GRID), Part(0, 6, 9, 5))
    assert piece.tolist() == [[0] * 4] * 3, (
        "rows 6 to 8 of 5 are all padding: are there three rows of zeros?"
    )
    assert piece.dtype == torch.float32, "do the zeros have the dtype of the tensor?"


@pytest.mark.exercise("tensor_parallel.cut")
def test_no_more_than_the_part_is_read():
    """A checkpoint may be larger than a rank's memory."""
    for part, size in ((Part(0, 1, 3, 5), 8), (Part(1, 2, 4, 4), 10), (Part(0, 3, 6, 5), 8)):
        stored = Stored(GRID)
        cut(stored, part)
        assert stored.num_read == size, (
            "numbers read from the file: do you read the whole tensor and then cut it?"
        )


@pytest.mark.exercise("tensor_parallel.cut")
def test_a_part_keeps_the_dtype_of_the_tensor():
    """Also where rows of zeros are added."""
    half = GRID.bfloat16()
    for part in (Part(0, 1, 3, 5), Part(0, 3, 6, 5), Part(0, 6, 9, 5)):
        assert cut(Stored(half), part).dtype == torch.bfloat16, (
            "the tensor is bfloat16: which dtype do your zeros have?"
        )


@pytest.mark.exercise("tensor_parallel.cut")
def test_rows_of_any_shape_are_padded():
    """A row of quantized weights is a matrix."""
    codes = torch.ones(5, 2, 3)
    piece = cut(Stored(codes), Part(0, 3, 6, 5))
    assert piece.shape == (3, 2, 3), "each row is [2, 3] here: do the zeros have its shape?"
    assert piece.sum() == 12, "two rows of ones and one of zeros"


def test_codes_are_cut_in_groups():
    """Input cuts select groups of 32 columns, output cuts select rows."""
    config = make_config(
        num_attention_heads=6, num_key_value_heads=3, head_dim=32, intermediate_size=96
    )
    take = take_part(config, 1, 3)
    codes = torch.arange(6 * 6).view(6, 6, 1)  # [hidden, groups, bytes]
    name = "model.layers.0.self_attn.o_proj.codes"
    assert torch.equal(take(name, codes), codes[:, 2:4])
    name = "model.layers.0.mlp.down_proj.scales"
    assert torch.equal(take(name, codes[:, :3]), codes[:, 1:2])
    rows = torch.arange(96).view(96, 1, 1)
    assert torch.equal(take("model.layers.0.mlp.up_proj.codes", rows), rows[32:64])


def test_a_cut_within_a_group_is_refused():
    """Scale and minimum belong to 32 columns. The message names the setting and the remedy."""
    config = make_config(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=96
    )
    take = take_part(config, 1, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 cuts columns 48 to 96 out of 96"):
        take("model.layers.0.self_attn.o_proj.codes", torch.zeros(6, 3, 16))


def test_a_tensor_of_another_size_is_refused():
    """The message has its name, because config.json and weights are of different models."""
    take = take_part(make_config(), 1, 3)
    with pytest.raises(ValueError, match=r"q_proj.weight has 500 .* for 576 in dimension 0"):
        take(LAYER + "self_attn.q_proj.weight", Stored(torch.ones(500, 2)))
    norm = torch.ones(7)
    assert take("model.norm.weight", Stored(norm)).tolist() == norm.tolist()


# -- the layers --


def make_linear(weight, bias=None):
    """A product with these numbers."""
    linear = Linear(len(weight[0]), len(weight), bias is not None, ops)
    linear.weight.data = torch.tensor(weight)
    if bias is not None:
        linear.bias.data = torch.tensor(bias)
    return linear


# [out, in] = [2, 4]; two ranks have two columns each.
WEIGHT = [[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 1.0]]
X = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 0.0]])


def row_parallel(bias, calls=None):
    """Return the product on each of two ranks, or how their calls differed."""

    def run(group):
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        layer = RowParallelLinear(make_linear([row[mine] for row in WEIGHT], bias), group)
        result = layer.forward(X[:, mine].clone())
        if calls is not None:
            calls.append(list(group.calls))
        return result.tolist()

    return on_all_ranks(2, run)


@pytest.mark.exercise("tensor_parallel.RowParallelLinear.forward")
def test_the_parts_add_up_to_the_whole():
    """Every rank continues with the sum."""
    results, apart = row_parallel(None)
    assert apart is None, "every rank waits for the others: does each of them call all_reduce?"
    assert results[0] == [[7, 6], [0, 1]], (
        "the whole product is [[7, 6], [0, 1]]: are the parts of all ranks added up?"
    )
    assert results[1] == results[0], (
        "every rank continues with the sum: does rank 1 have it as well?"
    )


@pytest.mark.exercise("tensor_parallel.RowParallelLinear.forward")
def test_the_bias_is_added_once():
    """It is in the result of every rank, once."""
    results, apart = row_parallel([10.0, 20.0])
    assert apart is None, "every rank waits for the others: does each of them call all_reduce?"
    assert results[0] == [[17, 26], [10, 21]], (
        "[[7, 6], [0, 1]] and the bias [10, 20]: is it in the result once, not once for each rank?"
    )
    assert results[1] == results[0], "does rank 1 have the bias in its result too?"


@pytest.mark.exercise("tensor_parallel.RowParallelLinear.forward")
def test_one_sum_is_enough():
    """Each sum makes all ranks wait."""
    calls = []
    row_parallel([10.0, 20.0], calls)
    assert calls == [["all_reduce"]] * 2, "how often do the ranks wait for each other?"


@pytest.mark.exercise("tensor_parallel.RowParallelLinear.forward")
def test_the_sum_keeps_the_dtype():
    """The next layer's weights are bfloat16 too."""

    def run(group):
        layer = RowParallelLinear(make_linear([[1.0, 2.0]]).bfloat16(), group)
        return layer.forward(torch.ones(1, 2).bfloat16()).dtype

    results, _ = on_all_ranks(2, run)
    assert results == [torch.bfloat16] * 2, "x is bfloat16: is the result bfloat16 too?"


TABLE = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [5.0, 50.0], [0.0, 0.0]])


def embed(token_ids, watch=None):
    """Return the rows on each of three ranks, which hold two tokens each."""

    def run(group):
        embedding = Embedding(2, 2, ops)
        embedding.weight.data = TABLE[2 * group.rank : 2 * group.rank + 2].clone()
        layer, ids = VocabParallelEmbedding(embedding, group), torch.tensor(token_ids)
        if watch is not None:
            watch.append(question_of(layer.forward, ids))
            return None
        result = layer.forward(ids)
        return result.tolist(), ids.tolist()

    return on_all_ranks(3, run)


@pytest.mark.exercise("tensor_parallel.VocabParallelEmbedding.forward")
def test_every_token_gets_its_row():
    """One rank holds it; the others add zeros."""
    results, apart = embed([3, 0, 4, 1])
    assert apart is None, "every rank waits for the others: does each of them call all_reduce?"
    rows = [[4, 40], [1, 10], [5, 50], [2, 20]]
    assert results[0][0] == rows, (
        "tokens 3, 0, 4, 1, two to a rank: token 3 is row 1 of rank 1, and every other rank adds"
        " zeros for it. Does a rank add one of its rows for another rank's token?"
    )
    assert [result for result, _ in results] == [rows] * 3, "do all ranks have all the rows?"


@pytest.mark.exercise("tensor_parallel.VocabParallelEmbedding.forward")
def test_a_rank_without_tokens_joins_the_sum():
    """Here ranks 0 and 2 have none."""
    results, apart = embed([2, 3, 2])
    assert apart is None, (
        "none of the tokens is rank 0's: does it still call all_reduce? The others wait"
    )
    assert results[2][0] == [[3, 30], [4, 40], [3, 30]], "tokens 2 and 3 are rank 1's rows 0 and 1"


@pytest.mark.exercise("tensor_parallel.VocabParallelEmbedding.forward")
def test_the_token_ids_are_unchanged():
    """They belong to the step, which reads them again."""
    results, _ = embed([3, 0, 4])
    ids = [ids for _, ids in results]
    assert ids == [[3, 0, 4]] * 3, "do you write into input_ids?"


@pytest.mark.exercise("tensor_parallel.VocabParallelEmbedding.forward")
def test_an_embedding_reads_no_value_on_the_host():
    """A captured graph replays the same kernels, whatever the values are."""
    questions = []
    embed([3, 0, 4], questions)
    assert questions == [None] * 3, (
        "do you read a tensor's value on the host (if, any, x[mask]), or make a tensor without"
        " device=?"
    )


def logits_of(vocab_size, hidden, size=2):
    """Return the logits on each rank; token t's is t + 1 times the sum of the hidden state."""

    def run(group):
        rows = padded_vocab_size(vocab_size, size) // size
        numbers = [[t + 1.0] * 2 for t in range(group.rank * rows, (group.rank + 1) * rows)]
        head = VocabParallelHead(make_linear(numbers), vocab_size, group)
        return head.forward(torch.tensor(hidden)).tolist()

    return on_all_ranks(size, run)


@pytest.mark.exercise("tensor_parallel.VocabParallelHead.forward")
def test_logits_are_in_token_order():
    """One request: rank 0's tokens, then rank 1's."""
    results, apart = logits_of(4, [[1.0, 0.0]])
    assert apart is None, "every rank waits for the others: does each of them call all_gather?"
    assert results[0] == [[1, 2, 3, 4]], "rank 0 has tokens 0 and 1, rank 1 has 2 and 3"


@pytest.mark.exercise("tensor_parallel.VocabParallelHead.forward")
def test_every_request_gets_its_own_logits():
    """Code that is right for one request may mix three."""
    results, _ = logits_of(4, [[1.0, 0.0], [10.0, 0.0], [100.0, 0.0]])
    assert results[0] == [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400]], (
        "three requests: the parts are [R, N, V / R]. Which of R and N must come first before"
        " you flatten?"
    )
    assert results[1] == results[0], "does every rank have all logits?"


@pytest.mark.exercise("tensor_parallel.VocabParallelHead.forward")
def test_padding_has_no_logits():
    """Five tokens are padded to six, and a sampler could choose a sixth."""
    results, _ = logits_of(5, [[1.0, 0.0], [10.0, 0.0]])
    assert [len(row) for row in results[0]] == [5, 5], (
        "5 tokens for 2 ranks make 3 rows each: do you return the padding's logit too?"
    )
    assert results[0][1] == [10, 20, 30, 40, 50], "the second request's five tokens, in order"


@pytest.mark.exercise("tensor_parallel.VocabParallelHead.forward")
def test_logits_of_all_ranks_are_returned():
    """Three ranks with two rows each."""
    results, _ = logits_of(5, [[1.0, 0.0]], size=3)
    assert results == [[[1, 2, 3, 4, 5]]] * 3, "3 ranks: are the logits of each of them there?"


# -- one choice --


def test_all_ranks_continue_with_the_leaders_tokens():
    """Only the leader samples, whatever the other ranks' logits are."""
    asked = []

    def run(group):
        def sample(logits, settings, positions):
            asked.append(group.rank)
            return logits.argmax(1)

        logits = torch.eye(3)[[group.rank]]  # each rank would choose another token
        chosen = choose_together(sample, group)(logits, SimpleNamespace(), torch.tensor([5]))
        return chosen.tolist()

    assert together(3, run) == [[0]] * 3
    assert asked == [0]


def test_ranks_that_make_different_calls_are_told_apart():
    """The meeting used by these tests reports a call that would otherwise hang."""
    with pytest.raises(Apart, match="rank 0: all_reduce, rank 1: no call"):
        together(2, lambda group: group.rank == 0 and group.all_reduce(torch.ones(1)))
