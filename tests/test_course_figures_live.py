"""The slider below a picture of a live notebook, and the picture alone everywhere else."""

import re
import sys

import pytest
from IPython.core.formatters import DisplayFormatter
from test_course_figures import make_trace

from course.figures import common, live

pytestmark = pytest.mark.course


class Kernel:
    """Stands for IPython's shell in a notebook."""

    kernel = None


@pytest.fixture
def live_notebook(monkeypatch):
    """As in the kernel of an interactive notebook."""
    monkeypatch.delenv("MINIVLLM_COURSE_STRICT", raising=False)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", Kernel)


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, in order; a picture that was displayed can be replaced."""
    objects = []

    class Handle:
        def update(self, thing):
            objects[0] = thing

    def display(thing, display_id=False):
        objects.append(thing)
        return Handle() if display_id else None

    monkeypatch.setattr("IPython.display.display", display)
    return objects


def test_alt_text_is_escaped():
    """Quotes and all: it is in a tag."""
    data = common.Picture(b"png", 'a "b" <c>')._repr_mimebundle_()
    assert data["text/html"].endswith(' alt="a &quot;b&quot; &lt;c&gt;">')
    assert data["text/plain"] == 'a "b" <c>'


@pytest.mark.usefixtures("live_notebook")
def test_an_executed_notebook_is_not_live(monkeypatch):
    """As `python -m course execute` and the tests run it."""
    assert live.is_live()
    monkeypatch.setenv("MINIVLLM_COURSE_STRICT", "1")
    assert not live.is_live()


def test_the_slider_puts_another_step_in_the_pictures_place(shown, monkeypatch):
    """It begins at the step that was asked for and ends at the last one."""
    monkeypatch.setattr(live, "is_live", lambda: True)  # ipywidgets wants no stand-in for a shell
    common.grid(make_trace(), 1)._ipython_display_()
    picture, slider = shown
    assert "KV blocks in step 1," in picture.alt
    assert (slider.min, slider.value, slider.max) == (0, 1, 2)
    slider.value = 2
    assert "KV blocks in step 2," in shown[0].alt
    assert type(shown[0]) is common.Picture


@pytest.mark.usefixtures("live_notebook")
def test_without_ipywidgets_the_picture_stands_still(shown, monkeypatch):
    """IPython takes the exception for "as usual"."""
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(NotImplementedError):
        common.grid(make_trace(), 1)._ipython_display_()
    assert not shown


def test_outside_of_a_live_notebook_a_film_is_a_picture():
    """Of the step in which most blocks were in use, if none is named."""
    data, _ = DisplayFormatter().format(common.grid(make_trace()))
    assert re.search(
        r'alt="Grid of blocks. KV blocks in step 1,.* 3 of 4 in use', data["text/html"]
    )
    assert set(data) == {"text/html", "text/plain"}
