"""The pictures of chapter 09 show their numbers in the image and in words."""

import json

import pytest
import torch
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import tensor_parallel as draw
from course.props.ranks import step_marks
from minivllm.tensor_parallel import Part

pytestmark = pytest.mark.course

STEP = {
    0: [("send", 0.0, 0.001), ("all_reduce", 0.002, 0.004), ("broadcast", 0.006, 0.007)],
    1: [("receive", 0.0, 0.002), ("all_reduce", 0.003, 0.004), ("broadcast", 0.005, 0.007)],
}
PIECES = [("x", [[1.0, 2.0]], None), "·", ("up", [[1.0], [0.5]], 0), "+", ("up", [[3.0], [4.0]], 1)]


def result(ranks, workload, decode, prefill, **more):
    """One result of `benchmarks/tensor_parallel.py`, as far as the picture reads it."""
    return {
        "model": "small shape, random weights",
        "dtype": "bfloat16",
        "device": "cuda",
        "machine": "a GPU",
        "versions": {"torch": "2.9"},
        "command": "python benchmarks/tensor_parallel.py",
        "date": "2026-01-01",
        "mode": "graphs",
        "tensor_parallel_size": ranks,
        "workload": workload,
        "decode_tokens_per_s": decode,
        "decode_tokens_per_s_all": [decode, decode and decode - 5],
        "prefill_tokens_per_s": prefill,
        "prefill_tokens_per_s_all": [prefill - 100, prefill],
        "sums_share": 0.25 * (ranks > 1),
        **dict.fromkeys(("output_tokens_per_s", "prompt_tokens_per_s", "seconds"), 1.0),
        **more,
    }


RESULTS = [
    result(1, "batch 64 x 512 in, 128 out", 1000.0, 9000.0),
    result(1, "prefill 64 x 512 in, 1 out", None, 9000.0),
    result(1, "batch 64 x 512 in, 128 out", 90.0, 900.0, mode="eager"),
    result(2, "batch 64 x 512 in, 128 out", 1500.0, 8000.0),
    result(2, "prefill 64 x 512 in, 1 out", None, 6000.0),
    result(4, "batch 64 x 512 in, 128 out", 2400.0, 8000.0),
    result(1, "batch 8 x 512 in, 128 out", 90.0, 900.0, model="lonely shape, random weights"),
    result(1, "batch 1 x 512 in, 128 out", 100.0, 900.0, model="large shape, random weights"),
    result(2, "batch 1 x 512 in, 128 out", 190.0, 900.0, model="large shape, random weights"),
]

ONES = torch.ones(1, 1)

PICTURES = {
    "gains": lambda: draw.gains(RESULTS),
    "memory": lambda: draw.memory({"large": 141.0, "small": 16.0}, {"card": 24.0}),
    "matrices": lambda: draw.matrices(PIECES, "Cut"),
    "heads": lambda: draw.heads(8, 2, {0: [0], 1: [0], 2: [1], 3: [1]}),
    "missing": lambda: draw.heads(8, 2, {0: [0], 1: [1], 2: [0], 3: [1]}),
    "shared": lambda: draw.heads(4, 4, {0: [0, 1], 1: [2, 3]}),
    "parts": lambda: draw.parts(
        {"q": ((6, 4), Part(0, 2, 4, 6)), "o": ((4, 6), Part(1, 2, 4, 6)), "n": ((4, 4), None)},
        "A layer",
    ),
    "latency": lambda: draw.latency({"2 ranks": {1024: 50.0, 4096: 80.0}}, {"one": 2048}),
    "by_outputs": lambda: draw.by_outputs(ONES, [2 * ONES, 3 * ONES], [4 * ONES, 5 * ONES]),
    "by_inputs": lambda: draw.by_inputs([ONES, 2 * ONES], [ONES, ONES], [4 * ONES, 5 * ONES]),
    "ranks_in_time": lambda: draw.ranks_in_time(STEP, "A step"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_fit_the_page_and_are_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


def test_pictures_are_the_same_each_time():
    """No date, no version: a notebook that is executed again changes no image."""
    assert PICTURES["matrices"]() == PICTURES["matrices"]()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory", ["large 141 GB on one, 17.6 GB on each of 8", "card 24 GB"]),
        ("matrices", ["x: [[1.0, 2.0]]; up: [[1.0], [0.5]]; up: [[3.0], [4.0]]"]),
        ("heads", ["8 query heads, 2 key/value heads, 4 ranks", "rank 1 holds [0]"]),
        ("missing", ["4 query heads cannot find", "q2 on rank 1 reads 0"]),
        ("shared", ["rank 1 holds [2, 3]"]),
        ("parts", ["q rows 2 to 3; o columns 2 to 3; n rows 0 to 3"]),
        ("latency", ["2 ranks: 50 µs for 1 KiB, 80 µs for 4 KiB"]),
        (
            "gains",
            [
                "small: 64 at a time, 2 GPUs 1.50 (1,000 to 1,500 tok/s)",
                "64 at a time, 4 GPUs 2.40",
                "64 prompts, 2 GPUs 0.67 (9,000 to 6,000 tok/s). large: 1 at a time, 2 GPUs 1.90",
            ],
        ),
        ("by_outputs", ["Cut by outputs. x: [[1.0]]; weight.T: [[2.0]]", "result: [[5.0]]"]),
        ("by_inputs", ["input: [[2.0]]; weight.T: [[1.0]]; sum: [[9.0]]"]),
        ("ranks_in_time", ["7.0 ms", "rank 1: 1 sums", "sum 2.00 ms, choice 1.00 ms"]),
    ],
)
def test_words_name_the_numbers(name, words):
    """The text has the numbers that the marks show."""
    alt = PICTURES[name]().alt
    assert [part for part in words if part not in alt] == [], alt


def test_heads_without_their_keys_are_marked():
    """Title and words say so, and only then."""
    assert "Missing" in PICTURES["missing"]().alt
    assert "Missing" not in PICTURES["heads"]().alt


def test_a_step_lasts_from_one_message_to_the_next():
    """Times are seconds since the first one; a wait for the second isn't part of the step."""
    later = [(name, begin + 5, end + 5) for name, begin, end in STEP[0]]
    marks = {
        0: [*later, ("send", 5.010, 5.011)],
        1: [
            ("receive", 4.0, 5.002),
            ("all_reduce", 5.003, 5.004),
            ("broadcast", 5.005, 5.007),
            ("receive", 5.007, 5.012),
        ],
    }
    found = step_marks(marks, 0)
    assert [name for name, _, _ in found[1]] == ["receive", "all_reduce", "broadcast"]
    assert found[1][0][1:] == (0.0, pytest.approx(0.002))
    assert [name for name, _, _ in found[0]] == ["send", "all_reduce", "broadcast"]


def test_recorded_are_all_runs_on_gpus(tmp_path):
    """There may be a file per model; runs on CPUs are left out."""
    assert draw.recorded(tmp_path) == []
    for name, results in (
        ("2026-01-01-cpu-tensor-parallel", RESULTS[:1]),
        ("2026-01-01-gpu-tensor-parallel-large", RESULTS[6:]),
        ("2026-01-01-gpu-tensor-parallel-small", RESULTS[1:2]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    assert draw.recorded(tmp_path) == [*RESULTS[6:], RESULTS[1]]
