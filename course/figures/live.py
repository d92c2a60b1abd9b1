"""A slider below a picture of a live notebook, which shows its other steps.

A notebook that a test or `python -m course execute` runs has no slider, and neither have saved
notebooks, web pages and prints: there the picture stands alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def is_live() -> bool:
    """Whether this is the kernel of an interactive notebook."""
    if "IPython" not in sys.modules or os.environ.get("MINIVLLM_COURSE_STRICT") == "1":
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")


def show_with_slider(
    still: Any, frame: Callable[[int], Any], number: int, num_frames: int, name: str
) -> None:
    """Show `still`, which is frame `number`, and below it a slider that puts others in its place.

    Raises NotImplementedError, after which IPython shows the object as usual, outside of a live
    notebook, without ipywidgets, and for a single frame.
    """
    if num_frames < 2 or not is_live():
        raise NotImplementedError
    try:
        from ipywidgets import IntSlider, Layout
    except ImportError:
        raise NotImplementedError from None
    from IPython.display import display

    slider = IntSlider(
        number, 0, num_frames - 1, description=name, layout=Layout(width="min(700px, 100%)")
    )
    # Drawing takes a tenth of a second: a frame for each place the slider passes would pile up.
    slider.continuous_update = False
    shown = display(still, display_id=True)
    slider.observe(lambda change: shown.update(frame(change["new"])), "value")
    display(slider)
