"""Pictures of what the engine did, drawn from a `Trace`.

`request_timeline` shows time, `block_grid` shows memory. Every state has a colour and a hatch,
height or label, so the pictures can be read without colour. Draws finished traces only. Not built
in the course.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.pictures.timeline import (
    Phase,
    Row,
    alt_text,
    block_owners,
    count,
    fullest_step,
    request_rows,
)
from minivllm.trace import StepTrace, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One palette for every figure: a state has the same colour everywhere.
PALETTE = {
    "waiting": "#b4bcc7",  # grey
    "prefill": "#2f6db5",  # blue
    "decode": "#8ad3a4",  # green
    "cached": "#f5bd3d",  # gold
    "free": "#ffffff",  # white
    "preempted": "#c0392b",  # red
    "ink": "#22272e",  # text and outlines
    "grid": "#ccd2da",  # grid lines, outlines of blocks
    "hatch": "#a9c6e8",  # the lines on the blue of prefill
}

WIDTH = 7.0  # inches: at DPI dots per inch the 700 pixels that a page has room for
DPI = 100
MAX_BLOCKS = 256  # blocks drawn at most: with more of them their numbers cannot be read
MAX_NUMBERED_ROWS = 32  # requests; more of them get thinner rows, and no numbers


# -- time --------------------------------------------------------------------------------------


def request_timeline(trace: Trace, ax: Axes | None = None) -> Figure:
    """Draw one row per request over the seconds of the trace: waiting, prefill, decode.

    A gold diamond marks a prefix found in the cache, with the tokens it saved; a red cross a
    preemption. The number at the end of a row is the tokens that were generated.
    Draws into `ax`, or into a new figure 7 inches wide; returns the figure.
    """
    rows = list(request_rows(trace).values())
    ax = ax or _new_axes(_timeline_height(trace))
    for y, row in enumerate(rows):
        _draw_row(ax, y, row, with_numbers=len(rows) <= MAX_NUMBERED_ROWS)
    seconds = trace.steps[-1].end if trace.steps else 1.0
    num_tokens = sum(row.num_tokens for row in rows)
    _label_axes(
        ax,
        f"{count(len(rows), 'request')}, {count(num_tokens, 'token')}"
        f" in {count(len(trace.steps), 'step')} and {seconds:.2f} s",
        "time (seconds)",
        "request",
    )
    ax.set_xlim(0, seconds * 1.1)  # room for the numbers at the ends
    ax.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    ticks = range(0, len(rows), 1 + len(rows) // (MAX_NUMBERED_ROWS + 1))
    ax.set_yticks(list(ticks), [rows[y].label for y in ticks])
    ax.grid(axis="x", color=PALETTE["grid"], linewidth=0.6)
    _add_legend(ax, _timeline_keys(rows))
    return _figure_of(ax)


def _draw_row(ax: Axes, y: int, row: Row, *, with_numbers: bool) -> None:
    for span in row.spans:
        height = 0.2 if span.phase == "waiting" else 0.72
        ax.barh(
            y,
            span.end - span.start,
            height,
            left=span.start,
            zorder=2,
            label=span.phase,
            **_fill(span.phase),
        )
    for time, num_tokens in row.cache_hits:
        ax.plot(time, y, **_marker("cached"))
        if with_numbers:
            _note(ax, time, y, str(num_tokens), offset=7)
    for time in row.preemptions:
        ax.plot(time, y - 0.36, **_marker("preempted"))  # above: at a diamond's time it hides none
    if with_numbers and row.num_tokens:
        end = max(span.end for span in row.spans if span.phase != "waiting")
        _note(ax, end, y, str(row.num_tokens) if y else count(row.num_tokens, "token"), offset=4)


def _fill(state: str) -> dict[str, Any]:
    look = {"facecolor": PALETTE[state], "edgecolor": PALETTE["grid"], "linewidth": 0}
    if state == "prefill":  # hatched: without colour, blue and green may look alike
        look |= {"edgecolor": PALETTE["hatch"], "hatch": "////"}
    return look


def _marker(state: str) -> dict[str, Any]:
    shape, size = {"cached": ("D", 6), "preempted": ("X", 8)}[state]
    return {
        "marker": shape,
        "markersize": size,
        "color": PALETTE[state],
        "linestyle": "none",
        "markeredgecolor": PALETTE["ink"],
        "markeredgewidth": 0.7,
        "zorder": 4,
    }


def _note(ax: Axes, x: float, y: float, text: str, *, offset: float) -> None:
    ax.annotate(
        text,
        (x, y),
        xytext=(offset, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=8,
        color=PALETTE["ink"],
        path_effects=halo(),
        zorder=5,
    )


def _timeline_keys(rows: list[Row]) -> list[Any]:
    from matplotlib.lines import Line2D

    keys = [_patch(phase, phase) for phase in ("waiting", "prefill", "decode")]
    if any(row.cache_hits for row in rows):
        keys.append(Line2D([], [], label="prefix cached (tokens)", **_marker("cached")))
    if any(row.preemptions for row in rows):
        keys.append(Line2D([], [], label="preempted", **_marker("preempted")))
    return keys


def _timeline_height(trace: Trace) -> float:
    return 1.3 + 0.27 * min(max(len(request_rows(trace)), 1), MAX_NUMBERED_ROWS)  # inches


# -- memory ------------------------------------------------------------------------------------


def block_grid(trace: Trace, step: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the KV blocks of one step: free, cached, or owned by a request.

    `step` is an index; None is the step with the most blocks in use. The text in a block is its
    request; ×2 is a block that two requests share. Of more than 256 blocks the 256 with the most
    in use are drawn, and the title says which.
    Draws into `ax`, or into a new figure 7 inches wide; returns the figure.
    Raises ValueError if the trace has no such step.
    """
    shown = _step(trace, step)
    owners = block_owners(trace, shown)
    number_of = {row.label: i for i, row in enumerate(request_rows(trace).values())}
    first, end = _window(trace.num_blocks, [*owners, *shown.cached_blocks])
    columns, num_rows = _grid_shape(trace.num_blocks)
    ax = ax or _new_axes(_grid_height(trace))
    for block in range(first, end):
        y, x = divmod(block - first, columns)
        own = owners.get(block, [])
        if own:
            _draw_owned(ax, x, y, own, number_of[own[0][0]])
        elif block in shown.cached_blocks:
            _draw_block(ax, x, y, "cached", "c")
        else:
            _draw_block(ax, x, y, "free")
    part = "" if end - first == trace.num_blocks else f" (drawn: {first} to {end - 1})"
    _label_axes(
        ax,
        f"KV blocks in step {shown.index}, at {shown.start:.2f} s: {len(owners)} of"
        f" {trace.num_blocks:,} in use, {len(shown.cached_blocks)} cached{part}",
        f"position in the row (blocks of {trace.block_size} tokens)",
        "first block of the row",
    )
    ax.set_xlim(-0.6, columns - 0.4)
    ax.set_ylim(num_rows - 0.4, -0.6)
    ax.set_aspect("equal", anchor="NW")
    ax.set_xticks(range(0, columns, 4))
    ax.set_yticks(range(num_rows), [str(first + y * columns) for y in range(num_rows)])
    _add_legend(ax, _block_keys())
    return _figure_of(ax)


def _step(trace: Trace, index: int | None) -> StepTrace:
    if index is None:
        return fullest_step(trace)
    if not 0 <= index < len(trace.steps):
        raise ValueError(f"step={index} is not in the trace, which has {len(trace.steps)} steps")
    return trace.steps[index]


def _window(num_blocks: int, interesting: Iterable[int]) -> tuple[int, int]:
    # The run of MAX_BLOCKS blocks that has the most interesting ones, as [first, end).
    counts = dict.fromkeys(range(0, num_blocks, MAX_BLOCKS), 0)
    for block in interesting:
        counts[block // MAX_BLOCKS * MAX_BLOCKS] += 1
    first = max(counts, key=lambda start: counts[start], default=0)
    return first, min(first + MAX_BLOCKS, num_blocks)


def _grid_shape(num_blocks: int) -> tuple[int, int]:
    columns = 32 if num_blocks > 64 else 16
    return columns, max(1, -(-min(num_blocks, MAX_BLOCKS) // columns))


def _grid_height(trace: Trace) -> float:
    columns, num_rows = _grid_shape(trace.num_blocks)
    return 1.2 + num_rows * 0.9 * WIDTH / columns  # inches


def _draw_owned(ax: Axes, x: int, y: int, owners: list[tuple[str, Phase]], number: int) -> None:
    label, phase = owners[0]
    text = label if len(owners) == 1 else f"×{len(owners)}"
    # Three shades tell the blocks of neighbouring requests apart.
    _draw_block(ax, x, y, phase, text, number % 3)
    if len(owners) > 1:  # a frame shows it even where ×2 is too small to read
        _square(ax, x, y, fill=False, edgecolor=PALETTE["ink"], linewidth=1.5, zorder=3)


def _draw_block(ax: Axes, x: int, y: int, state: str, text: str = "", paler: int = 0) -> None:
    _square(ax, x, y, **{**_fill(state), "facecolor": shade(state, paler), "linewidth": 0.8})
    if text:
        at: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 7, "zorder": 4}
        effects = halo() if state == "prefill" else []
        ax.text(x, y, text, color=PALETTE["ink"], path_effects=effects, **at)


def _square(ax: Axes, x: int, y: int, **look: Any) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x - 0.44, y - 0.44), 0.88, 0.88, **look))


def _block_keys() -> list[Any]:
    names = {
        "prefill": "owner in prefill",
        "decode": "owner in decode",
        "cached": "c: cached",
        "free": "free",
    }
    keys = [_patch(state, name) for state, name in names.items()]
    shared = _patch("decode", "×2: shared")
    shared.set(edgecolor=PALETTE["ink"], linewidth=1.5)
    return [*keys, shared]


# -- both, and what they share -----------------------------------------------------------------


def shade(state: str, step: int = 0) -> tuple[float, float, float]:
    """A colour of the palette (red, green, blue, 0 to 1), `step` steps paler."""
    from matplotlib.colors import to_rgb

    red, green, blue = (part + (1 - part) * 0.22 * step for part in to_rgb(PALETTE[state]))
    return red, green, blue


def halo() -> list[Any]:
    """Path effects that keep a text readable on any colour."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def save_demo_figure(trace: Trace, path: str | Path) -> None:
    """Write timeline and block grid, one above the other, as one PNG 700 pixels wide.

    The picture in words (`timeline.alt_text`) is stored in the file as its description.
    """
    _require_matplotlib()
    from matplotlib.figure import Figure

    # Not one of pyplot's figures: it needs no display and leaves no window open.
    heights = [_timeline_height(trace), _grid_height(trace)]
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    request_timeline(trace, upper)
    block_grid(trace, ax=lower)
    figure.savefig(path, format="png", dpi=DPI, metadata={"Description": alt_text(trace)})


def _new_axes(height: float) -> Axes:
    _require_matplotlib()
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    # Closed at once: a notebook then shows the figure that is returned, and shows it once.
    plt.close(figure)
    return ax


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            'figures need matplotlib, which is not installed: pip install "minivllm[course]"'
        ) from error


def _figure_of(ax: Axes) -> Figure:
    figure: Any = ax.get_figure()
    return figure


def _patch(state: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(label=label, **{**_fill(state), "linewidth": 0.8})


def _label_axes(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, pad=24)  # room for the legend
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _add_legend(ax: Axes, keys: list[Any]) -> None:
    ax.legend(
        handles=keys,
        ncols=len(keys),
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        borderaxespad=0.2,
        columnspacing=1.5,
        handletextpad=0.6,
        fontsize=8,
    )
