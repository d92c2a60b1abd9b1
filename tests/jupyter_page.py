"""JupyterLab in a browser without a window: a server, and what a learner does and sees there.

Needs Chromium and its driver as programs; nothing is downloaded, whatever is missing.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkout import environment

from course import sandbox

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 300  # seconds, for whatever is waited for: the machine may be busy
SIZE = (1280, 1000)  # pixels of the window
JUPYTER_FOLDERS = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
LAB_FOLDERS = ("SETTINGS_DIR", "WORKSPACES_DIR")
# No question about news in a corner of the page, and nothing is asked of the network.
NEWS = ("@jupyterlab/apputils-extension/notification.jupyterlab-settings", {"fetchNews": "false"})
CELL = '.jp-Cell[data-windowed-list-index="{}"]'


def lacking() -> str | None:
    """What the tests in a browser need and this machine does not have, or None."""
    if not any(map(shutil.which, BROWSERS)) or shutil.which("chromedriver") is None:
        return "needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return 'needs selenium: pip install -e ".[browser]"'
    return None


def wait_for(what: str, ask: Callable[[], Any]) -> Any:
    """The first answer that is true. Raises TimeoutError, which says what did not come."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if answer := ask():
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"in {LIMIT} seconds there was no {what}")


# -- the server ----------------------------------------------------------------------------


@contextmanager
def server(tree: Path, work: Path) -> Iterator[tuple[str, str]]:
    """`jupyter lab` in a checkout, as a learner starts it; yields its address and its token.

    Settings, workspaces and everything else that Jupyter keeps are in `work`.
    """
    settings = work / "JUPYTERLAB_SETTINGS_DIR" / NEWS[0]
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(NEWS[1]), "utf-8")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0", "--ip=127.0.0.1"]
    # The README's own line: where the server's root is decides which links and pictures work.
    lines = (tree / "README.md").read_text("utf-8").split("\n")
    command += shlex.split(next(line for line in lines if line.startswith("jupyter lab ")))[2:]
    with open(work / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--allow-root"],
            cwd=tree,
            env=_environment(tree, work),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        found = wait_for("JupyterLab", lambda: _address(process, work))
        yield found["url"], found["token"]
    finally:
        process.terminate()  # ends the kernels, too
        process.wait(timeout=60)


def _environment(tree: Path, work: Path) -> dict[str, str]:
    names = [f"JUPYTER_{name}" for name in JUPYTER_FOLDERS]
    names += [f"JUPYTERLAB_{name}" for name in LAB_FOLDERS] + ["IPYTHONDIR"]
    variables = environment(tree, **{name: str(work / name) for name in names})
    for name in ("JUPYTER_PATH", sandbox.STRICT):  # a learner has none of these
        variables.pop(name, None)
    return variables | {"JUPYTER_PREFER_ENV_PATH": "1"}


def _address(process: subprocess.Popen[bytes], work: Path) -> dict[str, str] | None:
    """What a server that has started says of itself."""
    if process.poll() is not None:
        raise RuntimeError(f"JupyterLab ended: {(work / 'log').read_text('utf-8')[-2000:]}")
    for path in (work / "JUPYTER_RUNTIME_DIR").glob("jpserver-*.json"):
        try:
            return dict(json.loads(path.read_text("utf-8")))
        except ValueError:  # half written
            pass
    return None


# -- the browser ---------------------------------------------------------------------------


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window; yields selenium's driver."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    options.add_argument(f"--window-size={SIZE[0]},{SIZE[1]}")
    # Containers have a small /dev/shm, and forbid what the sandbox needs. All pages are ours.
    for name in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{name}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(LIMIT)
        driver.set_script_timeout(LIMIT)
        yield driver
    finally:
        driver.quit()


class Page:
    """A notebook in JupyterLab. Cells have the numbers that they have in the file, from 0."""

    def __init__(self, driver: Any, address: str, token: str) -> None:
        self.driver = driver
        self.address = address
        self.token = token

    def open(self, tree: Path, notebook: str) -> None:
        """Open it, and wait for its kernel."""
        self.path = tree / notebook
        self.cells = json.loads(self.path.read_text("utf-8"))["cells"]
        self.driver.get(f"{self.address}lab/tree/{notebook}?reset&token={self.token}")
        # The circle next to the kernel's name is empty before there is a kernel, too.
        status = "document.getElementById('jp-main-statusbar')?.textContent.includes('| Idle')"
        wait_for("idle kernel", lambda: self.ask(status))

    def find(self, selector: str) -> list[Any]:
        """The elements of a CSS selector."""
        return list(self.driver.find_elements("css selector", selector))

    def ask(self, script: str, *arguments: Any) -> Any:
        """What a line of JavaScript returns."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def number_of(self, cell_id: str) -> int:
        """The place of a cell."""
        return next(i for i, cell in enumerate(self.cells) if cell["id"] == cell_id)

    def run_all(self) -> None:
        """The menu's "Run All Cells", to its end; an error in a cell is raised."""
        self.driver.find_element("xpath", "//li[contains(@class, 'MenuBar')][.='Run']").click()
        entry = 'li[data-command="runmenu:run-all"]'
        wait_for("entry in the menu", lambda: self.find(entry))[0].click()
        wait_for("end of the notebook", self._has_run)

    def _has_run(self) -> bool:
        error = '[data-mime-type="application/vnd.jupyter.error"]'
        if stopped := self.find(error):
            raise RuntimeError(f"Run All stopped: {stopped[0].text}")
        script = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
        prompts = self.ask(f"{script}.map(prompt => prompt.textContent)")
        num_code = sum(cell["cell_type"] == "code" for cell in self.cells)
        return len(prompts) == num_code and all(re.fullmatch(r"\[\d+\]:", p) for p in prompts)

    def output(self, number: int) -> str:
        """The text below a cell."""
        area = CELL.format(number) + " .jp-OutputArea"
        return str(self.ask("document.querySelector(arguments[0])?.textContent ?? ''", area))

    def wait_for_output(self, number: int, start: str) -> str:
        """The text below a cell, once it begins so."""
        what = f"output of cell {number} that begins with {start!r}"
        wait_for(what, lambda: self.output(number).startswith(start))
        return self.output(number)

    def answer(self, number: int, line: str) -> None:
        """Type over the last line of a build cell, its hole at first; run it and the cell below."""
        from selenium.webdriver.common.keys import Keys

        editor = self.find(CELL.format(number) + " .cm-content")[0]
        self.ask("arguments[0].scrollIntoView({block: 'center'})", editor)
        editor.click()
        editor.send_keys(Keys.CONTROL, Keys.END, Keys.NULL, Keys.SHIFT, Keys.HOME, Keys.NULL, line)
        for _ in ("build", "check"):
            self.driver.switch_to.active_element.send_keys(Keys.SHIFT, Keys.ENTER, Keys.NULL)

    def run(self, number: int) -> None:
        """Shift+Enter in a cell."""
        from selenium.webdriver.common.keys import Keys

        editor = self.find(CELL.format(number) + " .cm-content")[0]
        self.ask("arguments[0].scrollIntoView({block: 'center'})", editor)
        editor.click()
        editor.send_keys(Keys.SHIFT, Keys.ENTER, Keys.NULL)

    def press_left(self, number: int) -> None:
        """The arrow key, on the slider below a cell."""
        from selenium.webdriver.common.keys import Keys

        handle = CELL.format(number) + " .noUi-handle"
        wait_for("slider", lambda: self.find(handle))[0].send_keys(Keys.ARROW_LEFT)

    def figures(self) -> list[dict[str, Any]]:
        """The pictures that cells have drawn: cell, words, width in pixels (0: cannot be read)."""
        return list(
            self.ask(
                "[...document.querySelectorAll('.jp-OutputArea-output img')].map(img => ({"
                "cell: +img.closest('.jp-Cell').dataset.windowedListIndex,"
                " alt: img.alt, width: img.naturalWidth}))"
            )
        )

    def save(self) -> list[dict[str, Any]]:
        """Ctrl+S; returns the cells of the file."""
        from selenium.webdriver.common.keys import Keys

        before = self.path.read_bytes()

        def saved() -> list[dict[str, Any]]:
            after = self.path.read_bytes()
            try:
                return list(json.loads(after)["cells"]) if after != before else []
            except ValueError:  # half written
                return []

        self.driver.switch_to.active_element.send_keys(Keys.CONTROL, "s", Keys.NULL)
        return list(wait_for("saved notebook", saved))
