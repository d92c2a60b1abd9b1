"""What a picture can do where somebody looks at it, and its twin where nobody does."""

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
def looked_at(monkeypatch):
    """As in the kernel of a notebook at which somebody works."""
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


@pytest.mark.usefixtures("looked_at")
def test_words_stand_where_jupyterlab_shows_them():
    """In the tag's alt, quotes and all; image and plain text stay, for exports."""
    data, metadata = common.Picture(b"png", 'a "b" <c>')._repr_mimebundle_()
    assert data["text/html"].endswith(' alt="a &quot;b&quot; &lt;c&gt;">')
    assert data["image/png"] in data["text/html"]
    assert metadata["image/png"]["alt"] == data["text/plain"] == 'a "b" <c>'


@pytest.mark.usefixtures("looked_at")
def test_a_test_of_a_notebook_is_nobody(monkeypatch):
    """Nor is `python -m course execute`: what is saved are image and words."""
    assert live.is_live()
    monkeypatch.setenv("MINIVLLM_COURSE_STRICT", "1")
    assert not live.is_live()
    assert set(common.Picture(b"png", "words")._repr_mimebundle_()[0]) == {
        "image/png",
        "text/plain",
    }


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


@pytest.mark.usefixtures("looked_at")
def test_without_ipywidgets_the_picture_stands_still(shown, monkeypatch):
    """IPython takes the exception for "as usual"."""
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(NotImplementedError):
        common.grid(make_trace(), 1)._ipython_display_()
    assert not shown


def test_where_nobody_looks_a_film_is_a_picture():
    """Of the step in which most blocks were in use, if none is named."""
    data, metadata = DisplayFormatter().format(common.grid(make_trace()))
    assert re.search(r"KV blocks in step 1,.* 3 of 4 in use", metadata["image/png"]["alt"])
    assert set(data) == {"image/png", "text/plain"}
