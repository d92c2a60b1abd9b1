"""The lessons' pictures say what they were given, in the image and in words."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import block_manager as draw
from course.figures import common
from minivllm.trace import ChunkTrace, StepTrace, Trace

pytestmark = pytest.mark.course

DOCS = Path(__file__).parent.parent / "docs"


def make_trace():
    """a: prefill, decode, preempted; b at the same time; one block is cached at the end."""
    steps = [
        ([ChunkTrace("a", 0, 6, False, True)], {"a": (0, 1)}, (), ()),
        ([ChunkTrace("a", 6, 1, True, True)], {"a": (0, 1), "b": (0, 2)}, (), ()),
        ([ChunkTrace("b", 4, 1, True, True)], {"b": (0, 2)}, ("a",), (1,)),
    ]
    trace = Trace(4, 4, began=0.0, arrivals={"a": 0.0, "b": 0.0})
    for index, (chunks, tables, preempted, cached) in enumerate(steps):
        trace.steps.append(
            StepTrace(
                index=index,
                start=float(index),
                end=index + 1.0,
                chunks=tuple(chunks),
                preempted=preempted,
                finished=(),
                num_waiting=0,
                block_tables=tables,
                cached_blocks=frozenset(cached),
            )
        )
    return trace


PICTURES = {
    "reservations": lambda: draw.reservations([100, 300], reserved=1000),
    "memory_strip": lambda: draw.memory_strip({"a": (0, 40), "b": (60, 30)}, 100, wanted=25),
    "slots": lambda: draw.slots({4: 1, 5: 2}, 4),
    "ownership": lambda: draw.ownership({"a": [0, 1], "b": [0, 2]}, [2, 1, 1, 0]),
    "trade_off": lambda: draw.trade_off({16: 0.04, 256: 0.4}, {16: 13.0, 256: 1.2}),
    "timeline": lambda: draw.timeline(make_trace()),
    "grid": lambda: draw.grid(make_trace(), 1),
    "block_history": lambda: draw.block_history(make_trace(), ["a"]),
    "at_once": lambda: draw.at_once({"reserved": make_trace(), "blocks": make_trace()}),
    "free_blocks": lambda: draw.free_blocks({"run": make_trace()}, {"run": 1}),
    "speeds": lambda: draw.speeds({"slow": 2.0, "fast": 40.0}, "a machine"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_the_page_and_is_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reservations", "2 requests reserve 2,000 slots, 1,000 each, and use 20.0%"),
        ("memory_strip", "30 slots are free, the largest gap has 20: a request for 25 waits"),
        ("slots", "4 tokens have 1 block; 5 tokens have 2 blocks"),
        ("ownership", "a has blocks [0, 1]; b has blocks [0, 2]. Counts: [2, 1, 1, 0]"),
        ("trade_off", "blocks of 16: 4% empty, 13 table entries; blocks of 256: 40% empty, 1"),
        ("timeline", "2 requests over 3 steps; 1 preemption"),
        ("grid", "KV blocks in step 1, at 1.00 s: 3 of 4 in use, 0 cached"),
        ("block_history", "2 requests use at most 3 of 4 blocks; request a uses 2 blocks"),
        ("at_once", "reserved: 1.3 at once, 3 steps; blocks: 1.3 at once, 3 steps"),
        ("free_blocks", "run: 1 preemption in 3 steps"),
        ("speeds", "fast: 20 times the speed of “slow”. slow 2.0, fast 40.0"),
    ],
)
def test_the_words_hold_the_numbers(name, words):
    """The text says what the image shows."""
    assert words in PICTURES[name]().alt


def test_gaps_at_both_ends_are_seen():
    """Memory before the first and behind the last request is free too."""
    assert (
        "70 slots are free, the largest gap has 60"
        in draw.memory_strip({"a": (10, 30)}, 100, wanted=65).alt
    )


def test_a_full_memory_has_no_gap():
    """Nothing free, nothing to draw, and no error."""
    assert (
        "0 slots are free, the largest gap has 0"
        in draw.memory_strip({"a": (0, 100)}, 100, wanted=1).alt
    )


def test_pictures_are_the_same_each_time():
    """No date, no version: a notebook that is executed again changes no image."""
    assert PICTURES["slots"]() == PICTURES["slots"]()


def test_numbers_name_their_machine_and_day():
    """A speed without them says nothing to a reader elsewhere."""
    assert re.fullmatch(r"\d+ cores? \(.+\), \d{4}-\d\d-\d\d", common.this_machine())


# -- the engine's map --


@pytest.mark.parametrize("path", sorted(DOCS.glob("engine_*.svg")), ids=lambda path: path.stem)
def test_the_lit_maps_are_made_from_the_map(path):
    """A change of docs/engine.svg reaches every chapter's picture."""
    module = path.stem.removeprefix("engine_")
    expected = common.lit_map((DOCS / "engine.svg").read_text("utf-8"), module)
    assert path.read_text("utf-8") == expected, (
        f"write docs/{path.name} again:"
        f" course.figures.common.lit_map(the text of docs/engine.svg, {module!r})"
    )


def test_one_box_is_lit():
    """The module's own, and the picture says so in its title."""
    lit = common.lit_map((DOCS / "engine.svg").read_text("utf-8"), "block_manager")
    assert re.findall(r'class="lit".*\n.*>(\w+)</text>', lit) == ["block_manager"]
    assert "block_manager lit" in lit


def test_an_unknown_module_cannot_be_lit():
    """A misspelt name is an error, not a map without light."""
    with pytest.raises(ValueError, match="module='blok' has 0 boxes"):
        common.lit_map((DOCS / "engine.svg").read_text("utf-8"), "blok")


def test_importing_them_loads_no_matplotlib():
    """Drawing libraries are loaded by the first picture, not by the import."""
    code = (
        "import sys, importlib\nfor name in sys.argv[1:]:\n"
        "    importlib.import_module(f'course.figures.{name}')\n"
        "    'matplotlib' in sys.modules and sys.exit(name)"
    )
    folder = Path(common.__file__).parent
    names = sorted(path.stem for path in folder.glob("[!_]*.py"))
    command = [sys.executable, "-c", code, *names]
    ran = subprocess.run(command, cwd=folder.parents[1], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert "block_manager" in names
