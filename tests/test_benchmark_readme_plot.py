"""benchmarks/readme_plot.py: the plots of the README say what the result files say."""

import importlib
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
readme_plot = importlib.import_module("readme_plot")
sys.path.remove(str(FOLDER))

COMMON = {
    "model": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "machine": "a laptop",
    "versions": {"torch": "2.13.0+cpu"},
    "date": "2026-11-30",
}


def result(workload, engine="minivllm", **speeds):
    """A result as `bench_results` keeps it."""
    return {**COMMON, "workload": workload, "engine": engine, **speeds}


PEERS = {
    "machine": "a GPU",
    "dtype": "bfloat16",
    "engines": [
        {"engine": "ours", "date": "2026-11-30", "output_tokens_per_s": [400, 400]},
        {
            "engine": "theirs",
            "version": "2",
            "date": "2026-11-29",
            "output_tokens_per_s": [90, 110],
        },
    ],
}
COMPARED = [
    result("batch 1 x 8 in, 8 out", decode_tokens_per_s=60.0),
    result("batch 1 x 8 in, 8 out", "transformers", decode_tokens_per_s=15.0),
    result("prefill 1 x 8 in, 1 out", decode_tokens_per_s=None),
    result("prefill 1 x 8 in, 1 out", "transformers", decode_tokens_per_s=None),
    result("ready: command to first token"),
]


def test_peers_are_compared_by_the_middle_of_their_runs():
    """With the versions and days they ran."""
    panel = readme_plot.peers_panel(PEERS)
    assert panel.rows == (("ours", (400.0,)), ("theirs", (100.0,)))
    assert panel.source == "theirs 2; 2026-11-29 to 2026-11-30"


def test_engines_are_compared_by_batch_and_by_nothing_else():
    """Prefill and the time to start have no decoded tokens."""
    panel = readme_plot.panel_of(COMPARED)
    assert panel.series == ("minivllm", "transformers")
    assert panel.rows == (("1", (60.0, 15.0)),)


def test_several_gpus_are_compared_with_one_in_the_mode_that_is_fastest():
    """Each batch in its fastest repeat; prompts and other modes are not shown."""

    def run(size, workload, mode, speeds):
        median = None if speeds is None else speeds[0]
        return result(
            workload,
            mode=mode,
            tensor_parallel_size=size,
            decode_tokens_per_s=median,
            decode_tokens_per_s_all=speeds,
        )

    panel = readme_plot.ranks_panel(
        [
            run(1, "batch 1 x 8 in, 8 out", "graphs", [50.0, 60.0]),
            run(1, "batch 1 x 8 in, 8 out", "eager", [5.0]),
            run(1, "prefill 8 x 8 in, 1 out", "graphs", None),
            run(2, "batch 1 x 8 in, 8 out", "graphs", [40.0, 30.0]),
            run(4, "batch 1 x 8 in, 8 out", "graphs", [90.0, 80.0]),
        ]
    )
    assert panel.series == ("1 GPU", "4 GPUs")
    assert panel.rows == (("1", (60.0, 90.0)),)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (220, [0, 50, 100, 150, 200]),
        (33527, [0, 10000, 20000, 30000]),
        (59379, [0, 20000, 40000]),
        (100, [0, 25, 50, 75, 100]),
        (999, [0, 250, 500, 750]),
        (8, [0, 2.5, 5, 7.5]),
    ],
)
def test_the_scale_has_round_numbers(most, expected):
    """Three to six of them, none past the longest bar."""
    assert readme_plot.ticks(most) == expected


def test_a_bar_is_as_long_as_its_number():
    """The longest fills the room there is; a second engine's has another look."""
    picture = ET.fromstring(
        readme_plot.draw([readme_plot.peers_panel(PEERS), readme_plot.panel_of(COMPARED)])
    )
    bars = [
        (float(rect.get("width")), rect.get("fill"))
        for rect in picture.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("stroke-width") == "0.6"
    ]
    plain, other = readme_plot.PALETTE["decode"], "url(#other)"
    keys = [(18.0, plain), (18.0, other)]
    assert bars == [(200.0, plain), (50.0, plain), *keys, (200.0, plain), (50.0, other)]


def test_the_words_for_the_picture_have_every_number():
    """Who does not see it loses nothing."""
    words = readme_plot.alt_text([readme_plot.peers_panel(PEERS), readme_plot.panel_of(COMPARED)])
    assert "output ours: 400, theirs: 100 (theirs 2; 2026-11-29 to 2026-11-30)" in words
    assert "minivllm 1: 60; transformers 1: 15" in words


def test_the_plots_of_the_readme_are_those_of_its_files():
    """`python benchmarks/readme_plot.py --write README.md` would change nothing."""
    root = FOLDER.parent
    page = (root / "README.md").read_text(encoding="utf-8")
    pictures = readme_plot.pictures_of(page, root)
    assert readme_plot.fill(page, pictures) == page
    assert set(pictures) == set(readme_plot.PICTURES)
    for file, panels in pictures.items():
        assert (root / file).read_text(encoding="utf-8") == readme_plot.draw(panels)
