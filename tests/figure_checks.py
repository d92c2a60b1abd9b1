"""What every picture of the course must be, for the tests of the chapters' figures."""

import base64
import html
import re
import struct
from itertools import combinations

import pytest
from matplotlib.text import Text

from course.figures import common


def assert_fits_the_page_and_is_described(draw):
    """700 pixels wide for a screen of any density, with alt text, and every text can be read."""
    figures = []
    render = common.png_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "png_of", lambda figure: figures.append(figure) or render(figure))
        shown = draw()
    data = shown._repr_mimebundle_()
    tag = r'<img src="data:image/png;base64,([^"]+)" width="700" alt="([^"]+)">'
    image, alt = re.fullmatch(tag, data["text/html"]).groups()
    png = base64.b64decode(image)
    assert png == shown.png
    assert struct.unpack(">I", png[16:20])[0] == 1400
    assert len(png) < 60_000, "a notebook with 16 of them must stay below 700 kB"
    assert html.unescape(alt) == data["text/plain"] == shown.alt
    assert len(shown.alt) > 30
    assert_texts_can_be_read(figures[0])
    for ax in figures[0].axes:
        lines = [line for line in ax.lines if len(line.get_xdata())]
        seen = [ax.bbox.overlaps(line.get_window_extent()) for line in lines]
        assert any(seen) or not lines, "the limits hide all lines"


def assert_texts_can_be_read(figure):
    """A title; no text that is tiny, reaches over the edge or overlaps another one."""
    renderer = figure.canvas.get_renderer()
    sheet = figure.bbox.padded(1)
    boxes = []
    for text in texts_of(figure):
        box = text.get_window_extent(renderer)
        assert text.get_fontsize() >= 6.5, text
        assert sheet.x0 <= box.x0 and box.x1 <= sheet.x1, f"{text} reaches over the edge"
        assert sheet.y0 <= box.y0 and box.y1 <= sheet.y1, f"{text} reaches over the edge"
        if text.get_rotation() % 90 == 0:  # others have empty corners in their boxes
            boxes.append((text.get_text(), box.padded(-2)))
    for (one, first), (other, second) in combinations(boxes, 2):
        assert not first.overlaps(second), f"{one!r} overlaps {other!r}"
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert figure.get_suptitle() or any(titles), "a figure needs a title"


def texts_of(figure):
    """The texts that are drawn: labels of ticks outside of the axes are not."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            drawn = [*axis.get_major_ticks(), *axis.get_minor_ticks()] if ax.axison else []
            for tick in [*axis.majorTicks, *axis.minorTicks]:
                if tick not in drawn or not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text
