"""Notebooks 00 and 03 in JupyterLab, in a real browser, as a learner has them before their eyes.

A checkpoint of a few kilobytes stands where the built-in model would be: nothing is fetched, and
every cell runs, in seconds. Each test goes on where the one before it stopped.
"""

import html

import jupyter_page
import pytest
from checkout import make_checkout
from jupyter_page import Page
from tiny_checkpoint import make_checkpoint
from toy_course import git

from minivllm.checkpoint.builtin_model import BUILTIN_MODELS, write_marker

lacking = jupyter_page.lacking()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(lacking is not None, reason=str(lacking)),
]

GENERATE_TOKENS, BLOCKS_FOR = "naive-generate_tokens", "block_manager-blocks_for"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A checkout of its own, and in the cache next to it a small model in the place of the real."""
    folder = make_checkout(tmp_path_factory.mktemp("browser") / "minivllm")
    model = BUILTIN_MODELS[0]
    path = make_checkpoint(folder.parent / "cache" / model.name, max_position_embeddings=2048)
    write_marker(path, model)
    return folder


@pytest.fixture(scope="module")
def page(tree):
    """One JupyterLab and one browser for all."""
    work = tree.parent / "jupyter"
    work.mkdir()
    with jupyter_page.server(tree, work) as (address, token), jupyter_page.browser() as driver:
        yield Page(driver, address, token)


@pytest.fixture(scope="module")
def tour(tree, page):
    """Notebook 00, after "Run All Cells"."""
    page.open(tree, "notebooks/00_tour.ipynb")
    page.run_all()
    return page


@pytest.fixture(scope="module")
def chapter_03(tree, page):
    """Notebook 03, after "Run All Cells"; the tests of 00 are through."""
    page.open(tree, "notebooks/03_block_manager.ipynb")
    page.run_all()
    return page


@pytest.fixture(autouse=True)
def screenshot(request, tree):
    """What the page looked like when a test failed."""
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before and "page" in request.fixturenames:
        path = tree.parent / f"{request.node.name}.png"
        request.getfixturevalue("page").driver.save_screenshot(str(path))
        print(f"screenshot: {path}")


def assert_drawn(page, num_figures):
    """Pictures that the browser can read, with words for those who cannot see them."""
    figures = page.figures()
    assert len(figures) >= num_figures
    for figure in figures:
        assert figure["width"] == 1400, figure  # two pixels for each of the page's 700
        assert len(figure["alt"]) > 30, figure


def test_run_all_reaches_the_end_of_the_tour(tour):
    """The model loads and answers, the exercise is open, and that stops nothing."""
    number = tour.number_of("check-" + GENERATE_TOKENS)
    assert tour.output(number).startswith("Open: naive.generate_tokens is still borrowed")
    assert "the same tokens: True" in [tour.output(i).strip() for i in range(len(tour.cells))]
    assert "03 block manager  □□□□□□  0 of 6 yours" in tour.output(len(tour.cells) - 1)


def test_the_pictures_of_the_tour_are_seen_and_described(tour):
    """JupyterLab itself would drop the words."""
    assert_drawn(tour, 5)


def test_a_slider_moves_a_picture_that_stands_still_in_the_file(tour):
    """The step before, drawn by the kernel; saved is a picture as any other."""
    number = next(i for i, cell in enumerate(tour.cells) if "draw.grid" in "".join(cell["source"]))
    before = [figure["alt"] for figure in tour.figures() if figure["cell"] == number]
    tour.press_left(number)
    jupyter_page.wait_for(
        "other step",
        lambda: before != [figure["alt"] for figure in tour.figures() if figure["cell"] == number],
    )
    [words] = [figure["alt"] for figure in tour.figures() if figure["cell"] == number]
    assert words.startswith("Grid of blocks. KV blocks in step ")
    still = tour.save()[number]["outputs"][0]
    assert f'alt="{html.escape(words)}"' in "".join(still["data"]["text/html"])


def test_a_wrong_answer_is_explained_in_the_page(tour):
    """The line that chapter 00 asks for, typed over the hole, and what the check says of it."""
    number = tour.number_of("build-" + GENERATE_TOKENS)
    tour.answer(number, "return list(prompt_token_ids)")
    text = tour.wait_for_output(number + 1, "✗ generate_tokens: only the new tokens are returned")
    assert "likely    5, 6, 7 follow 3, 4: do you return the new tokens" in text


def test_in_chapter_03_all_is_open_and_runs(chapter_03):
    """Six exercises, none of them in the way of the experiments and their pictures."""
    checks = [i for i, cell in enumerate(chapter_03.cells) if cell["id"].startswith("check-")]
    assert [chapter_03.output(i)[:6] for i in checks] == ["Open: "] * 6
    assert_drawn(chapter_03, 10)


def test_a_wrong_and_a_right_answer(chapter_03, tree):
    """Named, then passed: in the page, in the progress map and in the package."""
    number = chapter_03.number_of("build-" + BLOCKS_FOR)
    chapter_03.answer(number, "return num_tokens // block_size")
    text = chapter_03.wait_for_output(number + 1, "✗ blocks_for")
    assert "do you round down?" in text
    chapter_03.answer(number, "return (num_tokens + block_size - 1) // block_size")
    text = chapter_03.wait_for_output(number + 1, "✓ blocks_for")
    assert "03 block manager  ■□□□□□  1 of 6 yours" in text
    assert "+    return (num_tokens + block_size - 1)" in git(tree, "diff", "minivllm")


def test_the_map_shows_what_passed(chapter_03):
    """`%progress` in the last cell, run again."""
    last = len(chapter_03.cells) - 1
    chapter_03.run(last)
    jupyter_page.wait_for("new map", lambda: "■ blocks_for" in chapter_03.output(last))
    assert "1 of 6 yours" in chapter_03.output(last)
    # Of chapter 00 the wrong answer is theirs, and has not passed.
    assert "00 tour  ◧  1 of 1 yours, 1 not checked" in chapter_03.output(last)
