"""The figures show what the trace says, with titles, units and legends, 700 pixels wide."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import minivllm
from minivllm.pictures.figures import (
    DPI,
    PALETTE,
    WIDTH,
    block_grid,
    request_timeline,
    save_demo_figure,
    shade,
)
from minivllm.pictures.timeline import alt_text
from minivllm.trace import ChunkTrace, StepTrace, Trace


def step(index, chunks, *, preempted=(), finished=(), tables, cached=()):
    return StepTrace(
        index=index,
        start=float(index),
        end=index + 1.0,
        chunks=tuple(chunks),
        preempted=preempted,
        finished=finished,
        num_waiting=0,
        block_tables=tables,
        cached_blocks=frozenset(cached),
    )


def make_trace(num_blocks=20):
    """a: prefill, decode, preempted, resumed from the cache. b: waits, prefill, decode."""
    prompt_a, prompt_b = (
        ChunkTrace("a", 0, 6, False, True),
        ChunkTrace("b", 0, 4, False, True),
    )
    steps = [
        step(0, [prompt_a], tables={"a": (0, 1)}),
        step(1, [ChunkTrace("a", 6, 1, True, True), prompt_b], tables={"a": (0, 1), "b": (0, 2)}),
        step(
            2,
            [ChunkTrace("b", 4, 1, True, True)],
            preempted=("a",),
            tables={"b": (0, 2)},
            cached=[1],
        ),
        step(3, [ChunkTrace("a", 4, 4, False, True)], tables={"a": (0, 1)}, finished=("a",)),
    ]
    return Trace(num_blocks, 4, began=0.0, steps=steps, arrivals={"a": 0.0, "b": 0.0})


def draw(function, *args, **kwargs):
    figure = function(*args, **kwargs)
    figure.canvas.draw()
    return figure, figure.axes[0]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def faces(patches):
    return [to_hex(patch.get_facecolor()) for patch in patches]


def width_of(png):
    """Pixels, from the file itself."""
    return struct.unpack(">I", png.read_bytes()[16:20])[0]


# -- timeline ----------------------------------------------------------------------------------


def test_timeline_has_a_bar_per_span():
    """a: prefill, decode, waiting, prefill. b: waiting, prefill, decode, waiting."""
    _, ax = draw(request_timeline, make_trace())
    phases = [bar.get_label() for bar in ax.containers]
    assert phases[:4] == ["prefill", "decode", "waiting", "prefill"]
    assert phases[4:] == ["waiting", "prefill", "decode", "waiting"]
    assert len(ax.patches) == 8
    assert faces(ax.patches[:3]) == [PALETTE[p] for p in ("prefill", "decode", "waiting")]
    first = ax.patches[0]
    assert (first.get_x(), first.get_width()) == (0, 1)


def test_timeline_can_be_read_without_colour():
    """Waiting is thin, prefill hatched, decode plain; markers have different shapes."""
    _, ax = draw(request_timeline, make_trace())
    prefill, decode, waiting = ax.patches[:3]
    assert prefill.get_hatch() and not decode.get_hatch()
    assert waiting.get_height() < decode.get_height() / 2
    assert {line.get_marker() for line in ax.lines} == {"D", "X"}


def test_timeline_has_title_units_and_legend():
    """Nothing in it has to be guessed."""
    _, ax = draw(request_timeline, make_trace())
    assert ax.get_title(loc="left") == "2 requests, 5 tokens in 4 steps and 4.00 s"
    assert ax.get_xlabel() == "time (seconds)"
    assert ax.get_ylabel() == "request"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert legend(ax) == ["waiting", "prefill", "decode", "prefix cached (tokens)", "preempted"]


def test_timeline_numbers():
    """4 tokens from the cache; a got 3 tokens, b got 2."""
    _, ax = draw(request_timeline, make_trace())
    assert texts(ax) == ["4", "3 tokens", "2"]


def test_timeline_legend_names_only_what_is_there():
    """Without hits and preemptions there are three keys."""
    trace = make_trace()
    del trace.steps[2:]
    _, ax = draw(request_timeline, trace)
    assert legend(ax) == ["waiting", "prefill", "decode"]
    assert not ax.lines


def test_timeline_of_many_requests_and_of_none():
    """Numbers go before they overlap; an empty trace is an empty picture."""
    trace = Trace(8, 4, began=0.0, arrivals={str(i): 0.0 for i in range(100)})
    trace.steps.append(step(0, [ChunkTrace("7", 0, 4, False, True)], tables={"7": (0,)}))
    figure, ax = draw(request_timeline, trace)
    assert texts(ax) == []
    assert 20 <= len(ax.get_yticks()) <= 34
    assert figure.get_size_inches()[1] < 11
    _, ax = draw(request_timeline, Trace(8, 4))
    assert ax.get_title(loc="left").startswith("0 requests")


# -- blocks ------------------------------------------------------------------------------------


def test_grid_labels_owned_shared_cached_and_free():
    """Step 2: b owns 0 and 2, block 1 is cached, the other 17 are free."""
    _, ax = draw(block_grid, make_trace(), 2)
    assert texts(ax) == ["b", "c", "b"]
    colors = faces(ax.patches)
    assert len(colors) == 20
    assert colors.count(PALETTE["cached"]) == 1
    assert colors.count(PALETTE["free"]) == 17
    _, ax = draw(block_grid, make_trace(), 1)
    assert texts(ax) == ["×2", "a", "b"]


def test_grid_shows_the_fullest_step_unless_told():
    """Step 1 has three blocks in use, the others two."""
    _, ax = draw(block_grid, make_trace())
    assert ax.get_title(loc="left") == "KV blocks in step 1, at 1.00 s: 3 of 20 in use, 0 cached"


def test_grid_has_units_and_legend():
    """A block's size and number can be read from the axes."""
    _, ax = draw(block_grid, make_trace())
    assert ax.get_xlabel() == "position in the row (blocks of 4 tokens)"
    assert ax.get_ylabel() == "first block of the row"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "16"]
    assert legend(ax) == [
        "owner in prefill",
        "owner in decode",
        "c: cached",
        "free",
        "×2: shared",
    ]


def test_grid_of_many_blocks_says_which_it_shows():
    """Of 1,000 blocks the 256 with most in use."""
    trace = make_trace(1000)
    trace.steps[0] = step(0, trace.steps[0].chunks, tables={"a": (5, 600, 601, 700)})
    _, ax = draw(block_grid, trace, 0)
    assert ax.get_title(loc="left").endswith("4 of 1,000 in use, 0 cached (drawn: 512 to 767)")
    assert texts(ax) == ["a", "a", "a"]
    assert len(ax.patches) == 256
    assert ax.get_yticklabels()[0].get_text() == "512"


def test_last_part_of_many_blocks_may_be_short():
    """Blocks 256 to 259 are the second part of 260."""
    trace = make_trace(260)
    trace.steps[0] = step(0, trace.steps[0].chunks, tables={"a": (256, 259)})
    _, ax = draw(block_grid, trace, 0)
    assert len(ax.patches) == 4


@pytest.mark.parametrize("index", [-1, 4])
def test_step_that_does_not_exist_is_refused(index):
    """The message says which step was asked for and how many there are."""
    with pytest.raises(ValueError, match=f"step={index} .*4 steps"):
        block_grid(make_trace(), index)


def test_grid_without_steps_is_refused():
    """There is nothing to draw, and the message says what to do."""
    with pytest.raises(ValueError, match="run a request first"):
        block_grid(Trace(8, 4))


# -- files, axes, notebooks --------------------------------------------------------------------


def test_demo_figure_is_700_pixels_wide_and_described(tmp_path):
    """The PNG fits a page and carries its own alt text."""
    path = tmp_path / "demo.png"
    save_demo_figure(make_trace(), path)
    assert width_of(path) == 700
    assert alt_text(make_trace()).encode("latin-1") in path.read_bytes()


def test_figures_are_700_pixels_wide_and_nothing_sticks_out():
    """Each figure alone fits a page too, legend and numbers included."""
    assert WIDTH * DPI == 700
    for function in (request_timeline, block_grid):
        figure, ax = draw(function, make_trace())
        assert figure.get_size_inches()[0] * figure.dpi == 700
        for thing in (ax.get_legend(), ax.title, *ax.texts):
            box = thing.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= 700, thing


def test_figure_can_be_drawn_into_given_axes():
    """Two pictures side by side are the caller's to arrange; the figure is theirs."""
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert request_timeline(make_trace(), left) is figure
    assert block_grid(make_trace(), ax=right) is figure


def test_no_window_is_left_open():
    """pyplot keeps none of our figures, so a notebook shows each of them once."""
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    request_timeline(make_trace())
    block_grid(make_trace())
    assert plt.get_fignums() == before


def test_without_matplotlib_the_remedy_is_named():
    """The module can be imported, and drawing says what to install."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from minivllm import Trace\nfrom minivllm.pictures import figures\n"
        "figures.request_timeline(Trace(8, 4))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(minivllm.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        'ImportError: figures need matplotlib, which is not installed: pip install "minivllm'
        in (ran.stderr)
    )


def test_shades_get_paler_and_stay_themselves():
    """Step 0 is the palette's colour, each further step is nearer to white."""
    shades = [shade("decode", step) for step in range(3)]
    assert shades[0] == pytest.approx(
        [int(PALETTE["decode"][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    )
    assert sum(shades[0]) < sum(shades[1]) < sum(shades[2]) < 3
