"""The drawing of the rooms shows the imports of the code."""

import importlib
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"

sys.path.insert(0, str(DOCS))
draw_rooms = importlib.import_module("draw_rooms")
sys.path.remove(str(DOCS))


def test_the_drawing_is_what_the_code_imports():
    """A new import, module or room reaches the picture: run `python docs/draw_rooms.py`."""
    stored = (DOCS / "rooms.svg").read_text(encoding="utf-8")
    assert stored == draw_rooms.draw(), "write it again: python docs/draw_rooms.py"


def test_the_drawing_is_readable():
    """It is narrow enough, has a title and a description, and no text leaves its box."""
    svg = ElementTree.fromstring(draw_rooms.draw())
    assert int(svg.get("width")) <= 900
    words = {child.tag.split("}")[1]: child.text for child in svg}
    assert words["title"] == "The rooms of minivllm and what they import"
    assert "cpu imports layer 2" in words["desc"]
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        x = float(text.get("x"))
        rights = [box.right for box in draw_rooms.BOXES.values() if box.x < x < box.right]
        per_letter = {"name": 8.2, "module": 6.5}.get(text.get("class"), 6.1)
        assert x + per_letter * len(text.text) <= max(rights, default=draw_rooms.WIDTH), text.text


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, [("a", "b"), ("b", "c")]),
        ({"a": {"b"}, "b": {"a"}}, [("a", "b"), ("b", "a")]),
        (
            {"a": {"b", "c", "d"}, "b": {"a", "d"}, "c": {"d"}, "d": set()},
            [("a", "b"), ("a", "c"), ("b", "a"), ("c", "d")],
        ),
    ],
    ids=["a chain", "both ways", "through the other of a pair"],
)
def test_imports_that_follow_from_others_are_not_drawn(found, expected):
    """What another box imports as well needs no arrow of its own."""
    assert draw_rooms.arrows(found) == expected
