"""Each gate holds for a sound course, and a planted fault of its kind makes it fail."""

import os
import re
import shutil
import zipfile

import pytest
from nbformat.v4 import new_output
from toy_course import LESSON, MISTAKES, PACKAGE, TESTS, course, executed_toy, make_toy, run

from course import files
from course.authoring import gates, gates_pages, gates_wheel
from course.notebooks import as_text, read_notebook, write_notebook

pytestmark = pytest.mark.course

NOTEBOOK, SOLUTION = "notebooks/01_boxes.ipynb", "solutions/01_boxes.ipynb"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A sound toy, built and executed."""
    return executed_toy(tmp_path_factory.getbasetemp())


def faulty(folder, **parts) -> None:
    """Build a toy with a fault in one of its parts."""
    course(make_toy(folder, **parts), "build")


def failure(folder, *gates: int) -> str:
    """What `verify` says; it must fail at each of these gates."""
    arguments = [word for gate in gates for word in ("--gate", str(gate))]
    text = course(folder, "verify", *arguments, code=1)
    for gate in gates:
        assert f"FAILED  gate {gate}" in text
    return text


# -- the sound one -----------------------------------------------------------------------------


@pytest.mark.slow  # CI runs the same on the real chapters
def test_a_sound_course_passes_every_gate(built):
    """Gates 1 to 6."""
    arguments = [word for gate in "123456" for word in ("--gate", gate)]
    text = course(built, "verify", *arguments)
    assert text.count("ok      gate") == 6 and "FAILED" not in text


# -- 1: regenerating changes nothing -----------------------------------------------------------


@pytest.fixture
def here(built, tmp_path, monkeypatch):
    """A toy of one's own that the gates of this process look at."""
    toy = shutil.copytree(built, tmp_path / "toy")
    monkeypatch.setattr(files, "HOME", toy)
    return toy


def test_gate_1_sees_what_was_not_built(here):
    """A stale notebook, a missing one and an orphan are named with the command."""
    (here / "course/lessons/01_boxes.md").write_text(LESSON + "\n\nMore.\n", "utf-8")
    shutil.copy(here / NOTEBOOK, here / "notebooks/02_lost.ipynb")
    (here / SOLUTION).unlink()
    text = "\n".join(gates.same_again(["01_boxes"]))
    assert f"{NOTEBOOK} is not what the lesson and the package give: python -m course build" in text
    assert f"{SOLUTION} is missing: python -m course build" in text
    assert "notebooks/02_lost.ipynb has no lesson" in text


def test_gate_1_sees_outputs_in_the_wrong_places(here):
    """Solutions need them, blank notebooks must not have them."""
    for name, outputs in ((NOTEBOOK, [new_output("stream", text="hello")]), (SOLUTION, [])):
        nb = read_notebook(here / name)
        nb.cells[1].update(outputs=outputs, execution_count=None)
        write_notebook(here / name, as_text(nb))
    text = "\n".join(gates.same_again(["01_boxes"]))
    assert f"{NOTEBOOK} carries outputs" in text
    assert "python -m course execute 01_boxes" in text


def test_gate_1_sees_a_hand_edited_solution(here):
    """`build` would keep it, so the repair is another one."""
    nb = read_notebook(here / SOLUTION)
    nb.cells[0].source = "# 01 · Bags"
    write_notebook(here / SOLUTION, as_text(nb))
    assert "move the change into the lesson" in gates.same_again(["01_boxes"])[0]


# -- 2: solved cells rebuild the package -------------------------------------------------------


def test_gate_2_sees_solutions_that_rebuild_another_package(built, tmp_path):
    """The package was edited after the build."""
    toy = shutil.copytree(built, tmp_path / "toy")
    changed = PACKAGE.replace("-(-num_things // box_size)", "-((-num_things) // box_size)")
    (toy / "minivllm/boxes.py").write_text(changed, "utf-8")
    script = "from course.authoring.gates import rebuild_one; print(rebuild_one('01_boxes'))"
    assert "do not give minivllm/boxes.py back byte for byte" in run(toy, "-c", script).stdout


def test_gate_2_sees_solutions_that_fail(tmp_path):
    """A check that our own function does not pass, and an experiment that cannot run."""
    wrong = TESTS.replace("boxes_for(8, 4) == 2", "boxes_for(8, 4) == 3")
    faulty(tmp_path, tests=wrong, lesson=LESSON + "\n```python\n1 / 0\n```\n")
    text = failure(tmp_path, 2)
    assert "the solved build and check cells fail" in text and "expected  3" in text
    assert "the solution does not run" in text


# -- 3: blank notebooks run through ------------------------------------------------------------


def test_gate_3_sees_cells_that_need_the_readers_work(tmp_path):
    """An experiment that fails before anything is built."""
    lesson = LESSON + "\n```python\nassert 'Mine' in boxes_for.__doc__\n```\n"
    faulty(tmp_path, lesson=lesson)
    text = failure(tmp_path, 3)
    assert "this cell fails in the blank notebook" in text and "AssertionError" in text


def test_gate_3_sees_a_check_that_passes_with_no_work_done(built, tmp_path):
    """A build cell that has lost its hole."""
    toy = shutil.copytree(built, tmp_path / "toy")
    solved = {cell.id: cell.source for cell in read_notebook(toy / SOLUTION).cells}
    nb = read_notebook(toy / NOTEBOOK)
    for cell in nb.cells:
        cell.source = solved[cell.id]
    write_notebook(toy / NOTEBOOK, as_text(nb))
    assert "`%check boxes.boxes_for` must say that it is open" in failure(toy, 3)


# -- 4 and 5: wrong answers, staircase ---------------------------------------------------------


def test_gate_4_sees_wrong_answers_that_are_not_caught_by_name(tmp_path):
    """One that passes, one told other words, one of no exercise, and an exercise without any."""
    mistakes = MISTAKES.replace(
        "return num_things // box_size + 1", "return -(-num_things // box_size)"
    )
    mistakes = mistakes.replace('"boxes.Shelf.give"', '"boxes.Shelf.gave"')
    take = MISTAKES[MISTAKES.index('@mistake("boxes.Shelf.take"') :].split("\n\n\n")[0]
    mistakes += "\n\n" + take.replace("are the boxes still free?", "is the shelf empty?") + "\n"
    faulty(tmp_path, mistakes=mistakes)
    text = failure(tmp_path, 4)
    assert "does not say 'do you always add one?' to this wrong answer" in text
    assert "does not say 'is the shelf empty?' to this wrong answer" in text
    assert "boxes.Shelf.gave is not one of its exercises" in text
    assert "boxes.Shelf.give has no wrong answer" in text
    assert text.count("\n  - ") == 4  # and no others


def test_gate_4_sees_a_test_that_lets_a_wrong_answer_through(tmp_path):
    """The commonest fault: the library is right, the test is weak."""
    faulty(
        tmp_path, tests=TESTS.replace("assert boxes_for(5, 4) == 2", "assert boxes_for(8, 4) == 2")
    )
    assert "'do you round down?' to this wrong answer" in failure(tmp_path, 4)


def test_gate_5_sees_a_check_that_needs_a_later_exercise(tmp_path):
    """`boxes_for` cannot be checked before `take` is built."""
    needs = TESTS.replace(
        '"do you always add one?"', '"do you always add one?"\n    Shelf(2).take(1)'
    )
    faulty(tmp_path, tests=needs)
    text = failure(tmp_path, 5)
    assert "boxes.boxes_for cannot be checked before a later exercise is built" in text
    assert "boxes.Shelf.give cannot" not in text


# -- 6: pages ----------------------------------------------------------------------------------


def test_gate_6_sees_answers_dead_links_and_pictures_without_words(tmp_path):
    """All in one lesson, each named."""
    hint = "`taken, self.free = self.free[:num_boxes], self.free[num_boxes:]` then `return taken`"
    lesson = LESSON.replace("../minivllm/boxes.py", "../minivllm/bags.py")
    lesson += (
        "\n![](../minivllm/boxes.py)\n\n    return   -(-num_things\n      // box_size)\n\n" + hint
    )
    faulty(tmp_path, lesson=lesson)
    text = failure(tmp_path, 6)
    assert "the link ../minivllm/bags.py leads nowhere" in text
    assert "the picture ../minivllm/boxes.py has no alt text" in text
    assert "notebooks/01_boxes.ipynb: the answer of boxes.boxes_for is in it" in text


@pytest.mark.parametrize(
    ("text", "num_problems"),
    [
        ("[x](here.md) [y](here.md#part) [z](https://a.b/c) [a](#part) [m](mailto:a@b.c)", 0),
        ("`[x](gone.md)` and\n\n```\n[x](gone.md)\n```\n<!-- [x](gone.md) -->", 0),
        ("[x](gone.md)", 1),
        ('<a href="gone.md">x</a>', 1),
        ("![picture](here.md)", 0),
        ("![ ](here.md)", 1),
        ("[![](here.md)](here.md)", 1),
        ('<img src="here.md" alt="three boxes">', 0),
        ('<img src="here.md" alt="">', 1),
        ("<svg><title>boxes</title></svg>", 0),
        ("<svg></svg>", 1),
    ],
)
def test_text_is_read_for_links_and_pictures(tmp_path, text, num_problems):
    """Code is not text; other sites are not checked."""
    (tmp_path / "here.md").touch()
    assert len(list(gates_pages.text_problems(text, tmp_path / "page.md"))) == num_problems


@pytest.mark.parametrize(
    ("metadata", "num_problems"),
    [({}, 1), ({"image/png": {"width": 700}}, 1), ({"image/png": {"alt": "a grid"}}, 0)],
)
def test_a_figure_needs_alt_text_in_its_output(metadata, num_problems):
    """Where Jupyter and nbconvert look for it."""
    output = {"data": {"image/png": "aGk=", "text/plain": "<Figure>"}, "metadata": metadata}

    class Cell:
        source = "draw()"

    assert len(list(gates_pages.output_problems(output, Cell))) == num_problems


# -- 7: the wheel ------------------------------------------------------------------------------


def test_gate_7_the_wheel_is_the_package_alone_and_imports():
    """Built from this tree, looked into, installed, imported; environment.yml agrees."""
    assert gates_wheel.wheel_problems() == []
    assert gates_wheel.environment_problems() == []


def test_gate_7_sees_a_wheel_with_more_or_less_in_it(tmp_path):
    """The course must not be installed with the package."""
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("minivllm/__init__.py", "")
        wheel.writestr("course/authoring/build.py", "")
    text = "\n".join(gates_wheel.content_problems(tmp_path / "x.whl"))
    assert "The wheel holds course" in text
    assert "The wheel lacks" in text and "minivllm/scheduler.py" in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("- -e .[course]", "- -e .", "by the line: - -e .[course]"),
        ("python=3.12", "python=3.9", "requires-python"),
        ("  - pip\n", "  - pip\n  - numpy\n", "in pyproject.toml only"),
    ],
)
def test_gate_7_sees_an_environment_that_disagrees(tmp_path, monkeypatch, old, new, words):
    """conda users get what pip users get."""
    for name in ("environment.yml", "pyproject.toml"):
        shutil.copy(files.HOME / name, tmp_path)
    path = tmp_path / "environment.yml"
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
    monkeypatch.setattr(files, "HOME", tmp_path)
    assert words in "\n".join(gates_wheel.environment_problems())


def test_a_hosted_notebook_gets_what_the_course_needs_except_jupyter():
    """The extras name the same requirements with the same bounds."""
    text = (files.HOME / "pyproject.toml").read_text("utf-8")
    extras = {
        name: set(
            re.findall(r'"([^"]+)"', re.search(rf"^{name} = \[(.*?)^\]", text, re.M | re.S)[1])
        )
        for name in ("course", "hosted")
    }
    left = extras["course"] - extras["hosted"]
    assert extras["hosted"] <= extras["course"]
    names = {re.split("[>=]", requirement)[0] for requirement in left}
    assert names == {"jupyterlab", "jupytext", "nbclient", "nbval", "pytest-xdist"}


def test_the_checkout_on_the_path_makes_the_course_importable(tmp_path):
    """An editable install does that, and only that: no wheel holds the course."""
    script = (
        f"from setuptools import build_meta; print(build_meta.build_editable({str(tmp_path)!r}))"
    )
    tree = tmp_path / "tree"
    home = files.HOME
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("minivllm", "course"):
        shutil.copytree(home / name, tree / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(home / name, tree)
    gates_wheel.subprocess.run(
        [gates_wheel.sys.executable, "-c", script], cwd=tree, check=True, capture_output=True
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        paths = [wheel.read(n).decode().strip() for n in wheel.namelist() if n.endswith(".pth")]
    assert paths == [str(tree)]


def test_notebooks_side_by_side_have_one_thread_each(monkeypatch):
    """With one a core, numba's threads would wait for each other; afterwards all is as before."""
    for before in (None, "3"):
        if before:
            monkeypatch.setenv("NUMBA_NUM_THREADS", before)
        else:
            monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
        threads = gates.in_parallel(lambda thing: [os.environ["NUMBA_NUM_THREADS"]], [1, 2])
        assert threads == [before or "1"] * 2
        assert os.environ.get("NUMBA_NUM_THREADS") == before
