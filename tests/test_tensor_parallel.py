"""Shards: who holds which part, parts that add up to the whole, the same calls on every rank."""

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
    """The results by rank, and a word on ranks that went separate ways."""
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
    """Query head h reads head h // (H / K), so neighbours share one, not every second rank."""
    heads = [list(kv_heads_of(2, rank, 4)) for rank in range(4)]
    assert [len(mine) for mine in heads] == [1, 1, 1, 1], (
        "2 heads for 4 ranks: has every rank one head, also where there are fewer than ranks?"
    )
    assert heads == [[0], [0], [1], [1]], (
        "the first half of the query heads, on ranks 0 and 1, reads head 0: do both hold it?"
    )
    heads = [list(kv_heads_of(1, rank, 3)) for rank in range(3)]
    assert heads == [[0], [0], [0]], "one head for 3 ranks: does each of them hold it?"


@pytest.mark.exercise("tensor_parallel.kv_heads_of")
def test_four_ranks_share_eight_heads_in_order():
    """The numbers are a range, as `entries_of` takes them."""
    heads = [kv_heads_of(8, rank, 4) for rank in range(4)]
    assert [list(mine) for mine in heads] == [[0, 1], [2, 3], [4, 5], [6, 7]], (
        "8 heads for 4 ranks: do neighbours stay together?"
    )
    assert all(isinstance(mine, range) for mine in heads), "is a range returned in both cases?"


def test_shares_are_disjoint_and_complete():
    """In the order of the ranks."""
    shares = [share_of(12, rank, 3) for rank in range(3)]
    assert [number for share in shares for number in share] == list(range(12))


@pytest.mark.parametrize(("size", "expected"), [(1, 259), (2, 260), (3, 261), (4, 260), (7, 259)])
def test_the_vocabulary_is_padded_to_a_multiple(size, expected):
    """Of the number of ranks, and no further."""
    assert padded_vocab_size(259, size) == expected


@pytest.mark.parametrize(("heads", "kv_heads", "sizes"), [(9, 3, [1, 3]), (8, 2, [1, 2, 4, 8])])
def test_sizes_that_fit(heads, kv_heads, sizes):
    """Heads come out even, key/value heads also where there are fewer than ranks."""
    config = make_config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64)
    assert [size for size in range(1, 10) if fits(config, size)] == sizes


def test_what_does_not_fit_is_refused_with_the_sizes_that_would():
    """And with the numbers that do not divide."""
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
    assert part is not None, "q_proj gives heads: rank 1 of 3 holds a third of them"
    assert part == Part(0, 192, 384, 576), (
        "a weight is [out, in] and q_proj gives heads: rank 1 has rows 192-383, dimension 0"
    )
    assert part_of(LAYER + "self_attn.v_proj.weight", config, 2, 3) == Part(0, 128, 192, 192), (
        "rank 2 has the last of the 3 value heads, with 64 rows each: what does entries_of say?"
    )
    assert part_of(LAYER + "mlp.up_proj.weight", config, 0, 3) == Part(0, 0, 512, 1536), (
        "up_proj gives the columns of the MLP: rank 0 has the first 512 rows"
    )


@pytest.mark.exercise("tensor_parallel.part_of")
def test_what_takes_the_parts_in_is_cut_by_its_inputs():
    """Columns of the weight, dimension 1: the same numbers as the outputs before."""
    config = make_config()
    part = part_of(LAYER + "self_attn.o_proj.weight", config, 1, 3)
    assert part == Part(1, 192, 384, 576), (
        "rank 1 has heads 3-5, and o_proj takes them in: does it hold the columns of these heads"
        " (dimension 1)?"
    )
    part = part_of(LAYER + "mlp.down_proj.weight", config, 2, 3)
    assert part == Part(1, 1024, 1536, 1536), (
        "down_proj takes in what gate and up have made: does rank 2 hold its last 512 columns?"
    )


@pytest.mark.exercise("tensor_parallel.part_of")
def test_a_bias_goes_with_the_outputs():
    """It has one dimension. Of a row-parallel product every rank holds all of it."""
    config = make_config(attention_bias=True, mlp_bias=True)
    part = part_of(LAYER + "self_attn.q_proj.bias", config, 1, 3)
    assert part == Part(0, 192, 384, 576), (
        "rank 1 computes outputs 192-383 of q_proj: does it hold the biases of these?"
    )
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        assert part_of(LAYER + name, config, 1, 3) is None, (
            "o_proj and down_proj give a sum over all ranks, with all outputs: is the bias cut?"
        )


@pytest.mark.exercise("tensor_parallel.part_of")
def test_norms_are_held_by_every_rank():
    """They work on hidden states, which all ranks have whole."""
    for name in ("model.norm.weight", LAYER + "input_layernorm.weight"):
        assert part_of(name, make_config(), 1, 3) is None, "a norm is not cut: None says so"


@pytest.mark.exercise("tensor_parallel.part_of")
def test_embedding_and_head_are_cut_by_tokens():
    """The last rank's part goes on into the padding."""
    config = make_config(vocab_size=259)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert part_of(name, config, 2, 3) == Part(0, 174, 261, 259), (
            "259 tokens, padded to 261 for 3 ranks: the part ends with the padding, and whole says"
            " that there are 259"
        )


def test_entries_of_all_ranks_make_the_whole():
    """Where nothing is replicated."""
    config = make_config()
    for module in ("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens"):
        parts = [entries_of(module, config, rank, 3) for rank in range(3)]
        mine = [number for entries, _ in parts for number in entries]
        assert mine == list(range(parts[0][1])), module
    assert entries_of("input_layernorm", config, 0, 3) is None


# -- reading it --


class Stored:
    """A tensor in a file: strict about its ends, and it counts what is read."""

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
    assert cut(Stored(GRID[:, 0]), Part(0, 3, 5, 5)).tolist() == [12, 16], "a bias has rows alone"


@pytest.mark.exercise("tensor_parallel.cut")
def test_padding_is_zeros_behind_the_last_row():
    """All ranks' parts have the same shape."""
    piece = cut(Stored(GRID), Part(0, 3, 6, 5))
    assert piece.shape == (3, 4), "rows 3 to 5 of 5: is there a third row, which the file has not?"
    assert piece.tolist() == [[12, 13, 14, 15], [16, 17, 18, 19], [0, 0, 0, 0]], (
        "rows 3 and 4, then a row of zeros: what comes after the last row?"
    )


@pytest.mark.exercise("tensor_parallel.cut")
def test_a_part_may_be_padding_alone():
    """5 tokens for 3 ranks of 3: none is left for the last one."""
    piece = cut(Stored(GRID), Part(0, 6, 9, 5))
    assert piece.tolist() == [[0] * 4] * 3, (
        "rows 6 to 8 of 5 are all padding: as many rows of zeros as the part has?"
    )
    assert piece.dtype == torch.float32, "zeros of the tensor's own type"


@pytest.mark.exercise("tensor_parallel.cut")
def test_no_more_than_the_part_is_read():
    """A checkpoint may be larger than the memory of a rank."""
    for part, size in ((Part(0, 1, 3, 5), 8), (Part(1, 2, 4, 4), 10), (Part(0, 3, 6, 5), 8)):
        stored = Stored(GRID)
        cut(stored, part)
        assert stored.num_read == size, (
            "numbers read from the file: do you read all of it and cut then?"
        )


@pytest.mark.exercise("tensor_parallel.cut")
def test_a_part_keeps_the_dtype_of_the_tensor():
    """Also where rows of zeros are added."""
    half = GRID.bfloat16()
    for part in (Part(0, 1, 3, 5), Part(0, 3, 6, 5), Part(0, 6, 9, 5)):
        assert cut(Stored(half), part).dtype == torch.bfloat16, (
            "the tensor is bfloat16: of what type are your zeros?"
        )


def test_codes_are_cut_in_groups():
    """Of a product whose inputs are cut, the groups of 32 columns; of others, the rows as ever."""
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
    """Scale and minimum belong to 32 columns: the message names the setting and the way out."""
    config = make_config(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=96
    )
    take = take_part(config, 1, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 cuts columns 48 to 96 out of 96"):
        take("model.layers.0.self_attn.o_proj.codes", torch.zeros(6, 3, 16))


def test_a_tensor_of_another_size_is_refused():
    """With its name: config.json and weights are not of the same model."""
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
    """What each of two ranks gets of the product, or how they went separate ways."""

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
    """On every rank: all go on with it."""
    results, apart = row_parallel(None)
    assert apart is None, "every rank waits for the others: do all of them come to the sum?"
    assert results[0] == [[7, 6], [0, 1]], (
        "the whole product is [[7, 6], [0, 1]]: are the parts of all ranks added up?"
    )
    assert results[1] == results[0], "every rank goes on with the sum: has rank 1 got it as well?"


@pytest.mark.exercise("tensor_parallel.RowParallelLinear.forward")
def test_the_bias_is_added_once():
    """Not once for each rank, and on no rank alone."""
    results, apart = row_parallel([10.0, 20.0])
    assert apart is None, "every rank waits for the others: do all of them come to the sum?"
    assert results[0] == [[17, 26], [10, 21]], (
        "[[7, 6], [0, 1]] and the bias [10, 20]: is it in the result once, not once for each rank?"
    )
    assert results[1] == results[0], "has rank 1 the bias in its result too?"


@pytest.mark.exercise("tensor_parallel.RowParallelLinear.forward")
def test_one_sum_is_enough():
    """Each costs all ranks a wait."""
    calls = []
    row_parallel([10.0, 20.0], calls)
    assert calls == [["all_reduce"]] * 2, "how often do the ranks wait for each other?"


TABLE = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [5.0, 50.0], [0.0, 0.0]])


def embed(token_ids, watch=None):
    """What each of three ranks, with two tokens each, gets."""

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
    """From the rank that holds it; the others add zeros."""
    results, apart = embed([3, 0, 4, 1])
    assert apart is None, "every rank waits for the others: do all of them come to the sum?"
    rows = [[4, 40], [1, 10], [5, 50], [2, 20]]
    assert results[0][0] == rows, (
        "tokens 3, 0, 4, 1, two to a rank: token 3 is row 1 of rank 1, and every other rank adds"
        " zeros for it. Does a rank add a row of its own for the tokens of others?"
    )
    assert [result for result, _ in results] == [rows] * 3, "do all ranks have all the rows?"


@pytest.mark.exercise("tensor_parallel.VocabParallelEmbedding.forward")
def test_a_rank_without_tokens_comes_all_the_same():
    """Here ranks 0 and 2 have none."""
    results, apart = embed([2, 3, 2])
    assert apart is None, (
        "none of the tokens is rank 0's: does it come to the sum all the same? The others wait"
    )
    assert results[2][0] == [[3, 30], [4, 40], [3, 30]], "tokens 2 and 3 are rank 1's rows 0 and 1"


@pytest.mark.exercise("tensor_parallel.VocabParallelEmbedding.forward")
def test_the_token_ids_stay_as_they_are():
    """They belong to the step, which reads them again."""
    results, _ = embed([3, 0, 4])
    ids = [ids for _, ids in results]
    assert ids == [[3, 0, 4]] * 3, "do you write into input_ids?"


@pytest.mark.exercise("tensor_parallel.VocabParallelEmbedding.forward")
def test_an_embedding_asks_the_device_nothing():
    """A graph that replays it knows no `if`."""
    questions = []
    embed([3, 0, 4], questions)
    assert questions == [None] * 3, (
        "do you read a number of a tensor on the host (if, any, x[mask]), or make a tensor without"
        " device=?"
    )


def logits_of(vocab_size, hidden):
    """The logits on each of two ranks; token t's is t + 1 times the sum of the hidden state."""

    def run(group):
        rows = padded_vocab_size(vocab_size, 2) // 2
        numbers = [[t + 1.0] * 2 for t in range(group.rank * rows, (group.rank + 1) * rows)]
        head = VocabParallelHead(make_linear(numbers), vocab_size, group)
        return head.forward(torch.tensor(hidden)).tolist()

    return on_all_ranks(2, run)


@pytest.mark.exercise("tensor_parallel.VocabParallelHead.forward")
def test_logits_stand_in_the_order_of_the_tokens():
    """One request: rank 0's tokens, then rank 1's."""
    results, apart = logits_of(4, [[1.0, 0.0]])
    assert apart is None, "every rank waits for the others: do all of them come to the gathering?"
    assert results[0] == [[1, 2, 3, 4]], "rank 0 has tokens 0 and 1, rank 1 has 2 and 3"


@pytest.mark.exercise("tensor_parallel.VocabParallelHead.forward")
def test_every_request_gets_its_own_logits():
    """Three of them: what is right for one may mix three."""
    results, _ = logits_of(4, [[1.0, 0.0], [10.0, 0.0], [100.0, 0.0]])
    assert results[0] == [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400]], (
        "three requests: the parts are [R, N, V / R]. Which of R and N comes first before they are"
        " laid side by side?"
    )
    assert results[1] == results[0], "has every rank all logits?"


@pytest.mark.exercise("tensor_parallel.VocabParallelHead.forward")
def test_padding_has_no_logits():
    """Five tokens, padded to six: a sampler that sees a sixth may choose it."""
    results, _ = logits_of(5, [[1.0, 0.0], [10.0, 0.0]])
    assert [len(row) for row in results[0]] == [5, 5], (
        "5 tokens for 2 ranks make 3 rows each: does the logit of the padding come out as well?"
    )
    assert results[0][1] == [10, 20, 30, 40, 50], "the second request's five tokens, in order"


# -- one choice --


def test_all_ranks_go_on_with_the_leaders_tokens():
    """Whatever their own logits say; only the leader samples."""
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
    """The meeting of these tests notices at once what would hang otherwise."""
    with pytest.raises(Apart, match="rank 0: all_reduce, rank 1: no call"):
        together(2, lambda group: group.rank == 0 and group.all_reduce(torch.ones(1)))
