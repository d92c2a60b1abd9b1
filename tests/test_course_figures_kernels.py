"""The pictures of chapter 07 say what they were given, in the image and in words."""

import pytest
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import kernels as draw
from course.props.memory_watch import Access

pytestmark = pytest.mark.course

LOG = [
    Access((0, 0, 0), "store", "keys", (0, 1, 2, 3), 0),
    Access((1, 0, 0), "store", "keys", (8, 9), 2),
    Access((0, 1, 0), "load", "keys", (0, 1), 0),
    Access((0, 0, 0), "store", "keys", (4, 5), 0),
    Access((0, 3, 0), "load", "keys", (0, 1, 4, 5), 0),
]


def result(kernel, microseconds, compiled=None):
    """A result of benchmarks/kernels.py: a gigabyte or a teraflop."""
    return {
        "workload": f"{kernel}, 8 x 4",
        "microseconds": microseconds,
        "torch_microseconds": 4 * microseconds,
        "compiled_microseconds": compiled,
        "num_bytes": 10**9,
        "flops": 10**12,
        "limit_gb_per_s": 4000.0,
        "limit_tflop_per_s": 700.0,
        "machine": "a GPU",
        "versions": {"torch": "2.0", "triton": "3.0"},
        "date": "2026-01-31",
    }


PICTURES = {
    "tiles": lambda: draw.tiles([([0, 1], [1, 1]), ([2, 3], [1, 0])], size=3),
    "memory_map": lambda: draw.memory_map(LOG, {"keys": 12}),
    "cache_map": lambda: draw.cache_map({"a0": 3, "b1": 0}, num_blocks=2, block_size=2),
    "cache_traffic": lambda: draw.cache_traffic(LOG, width=2, block_size=2),
    "running_softmax": lambda: draw.running_softmax([[1, 1], [3]], [(1, 2, 6), (3, 1.5, 6.5)]),
    "parts": lambda: draw.parts([(0, 2), (2, 3)], [(1, 2, 6), (3, 1, 5)], (3, 1.5, 6.5)),
    "work_list": lambda: draw.work_list([300, 20], chunk_size=128, num_items=66),
    "speeds": lambda: draw.speeds([result("rms_norm", 500, 400), result("plan", 1000)]),
    "speeds in TFLOP/s": lambda: draw.speeds([result("attention", 2000)], "TFLOP/s"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_the_page_and_is_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiles", "2 programs, 3 places: 3 done, 1 masked"),
        ("memory_map", "keys: 8 of 12 places written"),
        ("cache_map", "2 blocks of 2 slots: a0 in slot 3, b1 in slot 0"),
        ("cache_traffic", "2 steps write 4 slots; the last one reads 2. step 0: 3 slots written"),
        ("running_softmax", "after tile 1: best 3, total 1.5, acc 6.5"),
        ("parts", "Together best 3.00, total 1.50: answer 4.333"),
        ("work_list", "4 of 66 items have work; the longest reads 128 keys, not 300"),
        (
            "speeds",
            "a GPU, torch 2.0, triton 3.0, 2026-01-31. Triton reaches up to 50% of the limit",
        ),
        ("speeds", "8 x 4: Triton 500 µs, torch 2,000 µs, compiled 400 µs, the limit 250 µs"),
        ("speeds in TFLOP/s", "71% of the limit, 700 TFLOP/s"),
    ],
)
def test_the_words_hold_the_numbers(name, words):
    """The text says what the image shows."""
    assert words in PICTURES[name]().alt
