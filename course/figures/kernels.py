"""The pictures of chapter 07: tiles and masks, programs and their memory, softmax in pieces, the
work list of a step, and recorded speeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course.figures.common import (
    DOTS,
    GRID,
    INK,
    Picture,
    dots,
    fill,
    key,
    label,
    legend,
    log_axis,
    look,
    mark,
    new_axes,
    picture,
    source,
    write,
)
from course.figures.common import this_machine as this_machine
from minivllm.measure.results import speed
from minivllm.pictures.figures import halo, shade
from minivllm.pictures.timeline import count

if TYPE_CHECKING:
    from course.props.memory_watch import Access

# -- tiles, masks, memory ------------------------------------------------------------------------


def tiles(found: Sequence[tuple[Sequence[int], Sequence[int]]], size: int) -> Picture:
    """The places of each program's tile: those that its mask lets through, and the others."""
    figure, ax = new_axes(1.2 + 0.4 * len(found))
    for program, (places, mask) in enumerate(found):
        for place, real in zip(places, mask, strict=True):
            style = fill("decode" if real else "free") | ({} if real else {"hatch": "xxx"})
            ax.barh(program, 0.9, 0.7, left=place - 0.45, **style)
            write(ax, place, program, str(place), path_effects=halo())
    ax.axvline(size - 0.5, color=INK, linestyle="--", linewidth=1.2)
    real = sum(sum(mask) for _, mask in found)
    masked = sum(len(mask) for _, mask in found) - real
    title = f"{count(len(found), 'program')}, {size} places: {real} done, {masked} masked"
    label(ax, title, "place (dashed: the end)", "program")
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_yticks(range(len(found)))
    legend(ax, [key("decode", "mask 1"), key("free", "mask 0: left alone", hatch="xxx")])
    rows = [
        f"program {n}: places {places[0]} to {places[-1]}" for n, (places, _) in enumerate(found)
    ]
    return picture(figure, f"Grid of programs and places. {title}. {'; '.join(rows)}.")


def memory_map(log: Iterable[Access], sizes: Mapping[str, int]) -> Picture:
    """The memory of each tensor as a strip: the programs that read and write each place."""
    figure, ax = new_axes(1.3 + 0.42 * len(sizes))
    users: dict[tuple[str, int], list[int]] = {}
    stored = set[tuple[str, int]]()
    for access in log:
        for place in access.places:
            if access.program[0] not in users.setdefault((access.tensor, place), []):
                users[access.tensor, place].append(access.program[0])
            if access.kind == "store":
                stored.add((access.tensor, place))
    for y, (name, size) in enumerate(sizes.items()):
        for place in range(size):
            spot = name, place
            state = "decode" if spot in stored else "cached" if spot in users else "free"
            ax.barh(y, 0.9, 0.7, left=place - 0.45, **fill(state, dotted=True))
            write(ax, place, y, " ".join(str(user) for user in users.get(spot, ())))
    label(ax, "Which program touches which place", "place in the tensor's memory", "")
    ax.set_xlim(-0.6, max(sizes.values()) - 0.4)
    ax.set_xticks(range(0, max(sizes.values()), max(1, max(sizes.values()) // 16)))
    ax.set_ylim(len(sizes) - 0.5, -0.5)
    ax.set_yticks(range(len(sizes)), list(sizes))
    names = [("cached", "read by program"), ("decode", "written by program"), ("free", "untouched")]
    legend(ax, [key(state, text, **fill(state, dotted=True)) for state, text in names])
    lines = []
    for name, size in sizes.items():
        spots = [(name, place) for place in range(size)]
        hit = sum(spot in users for spot in spots)
        word = "written" if any(spot in stored for spot in spots) else "read"
        lines.append(f"{name}: {hit} of {size} places {word}")
    return picture(figure, f"Strips of memory with program numbers. {'; '.join(lines)}.")


def cache_map(slots: Mapping[str, int], num_blocks: int, block_size: int) -> Picture:
    """The slots of a cache, a row for each block, and the tokens in them."""
    figure, ax = new_axes(1.2 + 0.26 * num_blocks)
    for block in range(num_blocks):
        ax.barh(block, block_size, 0.8, left=-0.5, **fill("free"))
        write(
            ax, block_size - 0.3, block, f"slots from {block * block_size}", ha="left", fontsize=7
        )
    for name, slot in slots.items():
        block, place = divmod(slot, block_size)
        ax.barh(block, 1, 0.8, left=place - 0.5, **fill("decode"))
        write(ax, place, block, name)
    label(ax, "A token's slot = block id × block size + place", "place in the block", "block id")
    ax.set_xlim(-0.6, block_size * 1.15)
    ax.set_xticks(range(block_size))
    ax.set_ylim(num_blocks - 0.5, -0.5)
    ax.set_yticks(range(num_blocks))
    legend(ax, [key("decode", "token (request, position)"), key("free", "block")])
    lines = [f"{name} in slot {slot}" for name, slot in slots.items()]
    return picture(
        figure, f"Grid of {num_blocks} blocks of {block_size} slots: {', '.join(lines)}."
    )


def cache_traffic(log: Iterable[Access], width: int, block_size: int) -> Picture:
    """The slots of a cache that each step of a run writes and reads.

    A step begins when program 0 stores; `width` numbers are a slot, lines separate the blocks.
    """
    written: list[set[int]] = []
    read: list[set[int]] = []
    for access in log:
        if access.kind == "store" and access.program[0] == 0:
            written.append(set())
            read.append(set())
        if written:
            target = written[-1] if access.kind == "store" else read[-1]
            target.update(place // width for place in access.places)
    figure, ax = new_axes(3.2)
    for step, (new, old) in enumerate(zip(written, read)):
        for slot in sorted(new | old):
            state = "decode" if slot in new else "cached"
            ax.bar(step, 0.9, 0.8, bottom=slot - 0.45, **fill(state, dotted=True))
    num_written = sum(map(len, written))
    title = f"{len(written)} steps write {num_written} slots; the last one reads {len(read[-1])}"
    label(ax, title, "step", "slot")
    ax.set_xticks(range(len(written)))
    end = max(max(slots, default=0) for slots in written) // block_size * block_size + block_size
    for block in range(block_size, end, block_size):
        ax.axhline(block - 0.5, color=INK, linewidth=0.8)
    ax.set_yticks(range(0, end, block_size))
    ax.set_ylim(-0.6, end - 0.4)
    legend(ax, [key("decode", "written (and read)"), key("cached", "read again", **DOTS)])
    lines = [f"step {n}: {count(len(new), 'slot')} written" for n, new in enumerate(written)]
    return picture(figure, f"Slots of the cache over steps. {title}. {'; '.join(lines)}.")


# -- softmax in pieces ---------------------------------------------------------------------------

State = tuple[float, float, float]  # best, total, acc


def running_softmax(scores: Sequence[Sequence[float]], states: Sequence[State]) -> Picture:
    """What each key weighs after each tile: 2^(score - best so far); and the state in numbers."""
    figure, axes = new_axes(0.7 + 0.95 * len(scores), rows=len(scores), sharex=True, squeeze=False)
    num_keys = sum(len(tile) for tile in scores)
    for number, (ax, state) in enumerate(zip(axes[:, 0], states, strict=True)):
        best, total, acc = state
        seen = [score for tile in scores[: number + 1] for score in tile]
        start = len(seen) - len(scores[number])
        for place, score in enumerate(seen):
            fresh = fill("decode" if place >= start else "cached", dotted=True)
            ax.bar(place, 2 ** (score - best), 0.8, **fresh)
        text = f"best {best:g}, total {total:g}, acc {acc:g}: answer {acc / total:.3g}"
        label(ax, f"Tile {number}: {text}", "key" if ax is axes[-1, 0] else "", "weight")
        ax.set_ylim(0, 1.15)
        ax.set_xlim(-0.6, num_keys - 0.4)
        ax.set_xticks(range(num_keys))
    keys = [
        key("decode", "this tile"),
        key("cached", "earlier tiles, shrunk to the new best", **DOTS),
    ]
    axes[-1, 0].legend(handles=keys, loc="upper left", fontsize=8, frameon=False)
    lines = [
        f"after tile {n}: best {b:g}, total {t:g}, acc {a:g}" for n, (b, t, a) in enumerate(states)
    ]
    return picture(figure, f"Weights of {num_keys} keys, a row for each tile. {'; '.join(lines)}.")


def parts(spans: Sequence[tuple[int, int]], states: Sequence[State], merged: State) -> Picture:
    """The parts of one request's keys (start, end), what each came to, and all together."""
    figure, ax = new_axes(1.3 + 0.4 * (len(spans) + 1))
    end = max(stop for _, stop in spans)
    rows = [*zip(spans, states, strict=True), ((0, end), merged)]
    lines = []
    for y, ((start, stop), (best, total, acc)) in enumerate(rows):
        state = "decode" if y == len(spans) else "cached"
        ax.barh(y, stop - start, 0.7, left=start, **fill(state, dotted=True))
        lines.append(f"best {best:.2f}, total {total:.2f}: answer {acc / total:.3f}")
        middle = (start + stop) / 2
        inside = 0.2 * end < middle < 0.8 * end
        side = "center" if inside else "left" if middle < end / 2 else "right"
        spot = middle if inside else start + end / 100 if side == "left" else stop - end / 100
        write(ax, spot, y, lines[-1], ha=side, fontsize=7, path_effects=halo())
    label(ax, "Parts run at the same time; one more program puts them together", "key", "")
    legend(ax, [key("cached", "a part", **DOTS), key("decode", "all keys")])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), [*(f"part {n}" for n in range(len(spans))), "together"])
    return picture(figure, f"Bars of keys. {'; '.join(lines[:-1])}. Together {lines[-1]}.")


def work_list(lens: Sequence[int], chunk_size: int, num_items: int) -> Picture:
    """Every request's keys cut into chunks; each chunk is one work item."""
    figure, ax = new_axes(1.2 + 0.32 * len(lens))
    item = 0
    for y, length in enumerate(lens):
        for start in range(0, length, chunk_size):
            size = min(chunk_size, length - start)
            style = fill("decode") | {"facecolor": shade("decode", item % 2 * 2)}
            ax.barh(y, size, 0.7, left=start, **style)
            if size > max(lens) / 60:
                write(ax, start + size / 2, y, str(item), fontsize=7)
            item += 1
    longest = min(max(lens), chunk_size)
    title = (
        f"{item} of {num_items} items have work; the longest reads {longest} keys, not {max(lens)}"
    )
    label(ax, title, "keys (a number: the item)", "request")
    ax.set_ylim(len(lens) - 0.5, -0.5)
    ax.set_yticks(range(len(lens)))
    lines = [f"request {n} has {length} keys" for n, length in enumerate(lens)]
    text = f"Bars of keys in chunks of {chunk_size}. {title}. {'; '.join(lines)}."
    return picture(figure, text)


# -- recorded speeds -----------------------------------------------------------------------------

Results = Sequence[Mapping[str, Any]]
# what limits it: the field of the work, that of the limit, and work per microsecond at a limit of 1
WORK = {
    "GB/s": ("num_bytes", "limit_gb_per_s", 1e3),
    "TFLOP/s": ("flops", "limit_tflop_per_s", 1e6),
}
LIMIT: dict[str, Any] = {
    "marker": "|",
    "markersize": 20,
    "markeredgewidth": 2.2,
    "color": INK,
    "linestyle": "none",
}
WAYS = (
    ("", "decode", "Triton"),
    ("torch_", "waiting", "torch"),
    ("compiled_", "prefill", "compiled"),
)


def speeds(results: Results, unit: str = "GB/s") -> Picture:
    """The time of each way to compute a workload, and the least time that the device allows.

    `unit` is what limits it: "GB/s" of memory, or "TFLOP/s" of arithmetic.
    """
    work, limit, per_second = WORK[unit]
    figure, ax = new_axes(1.7 + 0.42 * len(results))
    used = [way for way in WAYS if any(result[f"{way[0]}microseconds"] for result in results)]
    top = float(results[0][limit])
    shares: list[float] = []
    taken: list[float] = []
    lines = []
    for y, result in enumerate(results):
        least = result[work] / top / per_second
        found = {}
        for shift, (prefix, state, _) in zip((-0.2, 0, 0.2), used):
            if time := result[f"{prefix}microseconds"]:
                found[state] = time
                dots(ax, y + shift, {state: time}, [""])
        ax.plot(least, y, **LIMIT)
        shares.append(least / found["decode"])
        taken += found.values()
        told = ", ".join(f"{name} {speed(found[s])} µs" for _, s, name in used if s in found)
        lines.append(f"{result['workload']}: {told}, the limit {speed(least)} µs")
        share = f"{shares[-1]:.0%}" if shares[-1] > 0.01 else "< 1%"
        ax.text(1.02, y, share, fontsize=9, va="center", color=INK,
                transform=ax.get_yaxis_transform())  # fmt: skip
    ax.text(1.02, 1.02, "Triton, of\nthe limit", fontsize=8, color=INK, transform=ax.transAxes)
    title = f"Triton reaches up to {max(shares):.0%} of the limit, {top:,.0f} {unit}"
    label(ax, title, "microseconds (log scale)", "")
    names = [result["workload"].replace(", ", "\n") for result in results]
    ax.set_yticks(range(len(results)), names)
    ax.set_ylim(len(results) - 0.5, -0.5)
    log_axis(ax, min(taken) / 4, max(taken) * 1.6)
    ax.grid(axis="y", color=GRID, linewidth=0.6, linestyle=":")
    limit_key = mark("least time (if missing: further left)", **(LIMIT | {"markersize": 10}))
    legend(ax, [*(mark(name, **look(state)) for _, state, name in used), limit_key])
    about = results[0]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "triton"))
    where = f"{about['machine']}, {versions}, {about['date']}"
    source(figure, where)
    return picture(figure, f"Dots on a log axis of time, {where}. {title}. {'; '.join(lines)}.")
