"""Record docs/notebook.gif: a wrong answer, a right one, and the engine that runs on it.

    python docs/record_notebook.py

Drives a real JupyterLab in a checkout of its own, with the real model; needs what the browser's
tests need. Each picture of the animation is a screenshot.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path[:0] = [str(HOME), str(HOME / "tests")]

import jupyter_page  # noqa: E402
from checkout import make_checkout  # noqa: E402
from jupyter_page import CELL, Page  # noqa: E402
from PIL import Image  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from minivllm.checkpoint.builtin_model import cache_dir  # noqa: E402

NOTEBOOK = "notebooks/03_block_manager.ipynb"
EXERCISE = "block_manager-blocks_for"
WRONG = "return num_tokens // block_size"
RIGHT = "return (num_tokens + block_size - 1) // block_size"
SIZE = (920, 616)  # pixels of the page that is shown
PICTURE = "draw.grid(trace, "  # the figure of the real engine's run


class Recorder:
    """Screenshots with the time that each is shown."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.milliseconds: list[int] = []

    def take(self, milliseconds: int) -> None:
        """One screenshot of what is in view."""
        png = self.page.driver.get_screenshot_as_png()
        image = Image.open(io.BytesIO(png)).convert("RGB")
        self.frames.append(image.crop((0, 0, *SIZE)))
        self.milliseconds.append(milliseconds)

    def save(self, path: Path) -> None:
        """Write the animation, which repeats forever."""
        palette = [frame.quantize(64, dither=Image.Dither.NONE) for frame in self.frames]
        palette[0].save(
            path,
            save_all=True,
            append_images=palette[1:],
            duration=self.milliseconds,
            loop=0,
            optimize=True,
        )


def tidy(page: Page) -> None:
    """Hide side bar, menus and status bar: the notebook alone fills the window."""
    style = (
        "#jp-top-panel,#jp-main-statusbar,.jp-SideBar,#jp-menu-panel,.jp-NotebookPanel-toolbar,"
        ".lm-TabBar,#jp-bottom-panel{display:none !important}"
        "#jp-main-content-panel,#jp-main-dock-panel,#jp-main-split-panel,.jp-NotebookPanel,"
        ".jp-NotebookPanel-notebook,.jp-WindowedPanel-outer{position:fixed !important;"
        "inset:0 !important;width:100% !important;height:100% !important}"
    )
    page.ask("document.head.insertAdjacentHTML('beforeend', '<style>' + arguments[0])", style)


def show(page: Page, number: int) -> None:
    """Scroll a cell to the top of the window."""
    page.ask("document.querySelector(arguments[0]).scrollIntoView()", CELL.format(number))


def type_answer(page: Page, recorder: Recorder, number: int, line: str) -> None:
    """Type over the last line of a build cell in a few strokes, each recorded; run the check."""
    editor = page.find(CELL.format(number) + " .cm-content")[0]
    editor.click()
    editor.send_keys(Keys.CONTROL, Keys.END, Keys.NULL, Keys.SHIFT, Keys.HOME, Keys.NULL)
    for start in range(0, len(line), 9):
        page.driver.switch_to.active_element.send_keys(line[start : start + 9])
        recorder.take(150)
    recorder.take(500)
    for _ in ("build", "check"):
        page.driver.switch_to.active_element.send_keys(Keys.SHIFT, Keys.ENTER, Keys.NULL)


def record(page: Page, tree: Path) -> Recorder:
    """The story: open, wrong, right, and the engine."""
    recorder = Recorder(page)
    page.open(tree, NOTEBOOK)
    page.run_all()
    tidy(page)
    number = page.number_of("build-" + EXERCISE)
    show(page, number)
    recorder.take(2000)
    for line, mark, seconds in ((WRONG, "✗", 4), (RIGHT, "✓", 2)):
        type_answer(page, recorder, number, line)
        page.wait_for_output(number + 1, mark)
        show(page, number)
        recorder.take(1000 * seconds)
    picture = next(i for i, cell in enumerate(page.cells) if PICTURE in "".join(cell["source"]))
    for _ in range(3):  # cells get their heights when they come into view
        show(page, picture)
        time.sleep(1)
    recorder.take(4000)
    return recorder


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = make_checkout(Path(folder) / "minivllm")
        (tree.parent / "cache").symlink_to(cache_dir())
        work = tree.parent / "jupyter"
        work.mkdir()
        with jupyter_page.server(tree, work) as place, jupyter_page.browser() as driver:
            driver.set_window_size(SIZE[0], SIZE[1] + 144)  # and the bars of the browser
            record(Page(driver, *place), tree).save(HOME / "docs" / "notebook.gif")


if __name__ == "__main__":
    main()
