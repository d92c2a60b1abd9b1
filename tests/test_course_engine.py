"""Chapter 11's own tools: whose engine it is, the engine in a fresh process, the race, the toy.

The learner's path is walked in a checkout of its own, on a model of a few kilobytes.
"""

import re
import shutil
import subprocess
import sys

import pytest
from tiny_checkpoint import make_checkpoint

from course import exercises as ex
from course import files, sandbox
from course.files import HOME
from course.progress import whose_engine
from course.props import race
from course.props.toy_device import toy_engine

pytestmark = pytest.mark.course

FRESH = """
from minivllm import LLM, SamplingParams
from course.exercises import states
from course.progress import whose_engine
greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
quick = {{"device": "cpu", "attention_backend": "torch"}}  # numba would compile its kernels
with LLM({model!r}, num_kv_blocks=8, progress=False, **quick) as llm:
    print(llm.generate([[104, 105]], greedy, use_tqdm=False)[0].outputs[0].token_ids)
print(whose_engine(states()))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The tree with our version of every exercise."""
    folder = tmp_path_factory.mktemp("clone") / "minivllm"
    for name in ("minivllm", "course", "tests", "notebooks", "solutions"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(HOME / name, folder / name, ignore=skip)
    shutil.copy(HOME / "pyproject.toml", folder)
    sandbox.set_sources(folder, {e.name: e.reference for e in ex.exercises().values()})
    return folder


@pytest.fixture
def tree(clone, tmp_path):
    return shutil.copytree(clone, tmp_path / "minivllm")


def run(folder, *command):
    """What `python COMMAND...` prints in a checkout."""
    environment = sandbox.environment(folder) | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *command]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_an_engine_that_is_the_learners_alone(tree, tmp_path):
    """Every exercise is removed and written again: a fresh process runs on that, and says so."""
    (tree / "told.py").write_text(FRESH.format(model=str(make_checkpoint(tmp_path / "model"))))
    borrowed = run(tree, "-m", "told")
    run(tree, "-m", "course", "empty")
    write = "from course import exercises as ex; names = {e.name: e.reference for e in"
    write += " ex.exercises().values()}; ex.lay(names, mine=True)"
    run(tree, "-c", write)
    mine = run(tree, "-m", "told")
    assert "borrowed: 0" in mine, mine
    assert f"All {len(ex.exercises())} exercises" in mine
    assert mine.split("\n")[0] == borrowed.split("\n")[0], "the same tokens as on our engine"
    assert "borrowed: 0" in run(tree, "-m", "course", "progress")
    assert f"borrowed: {len(ex.exercises())}\n" in borrowed


def test_what_is_still_ours_is_named(tree):
    """Chapter by chapter, with the names; the number is the ledger's."""
    print_it = "from course.exercises import states; from course.progress import whose_engine;"
    print_it += "print(whose_engine(states()))"
    run(tree, "-m", "course", "open", "engine.Engine.step")
    said = run(tree, "-c", print_it)
    number = len(ex.exercises()) - 1
    assert said.startswith(f"borrowed: {number}, open: 1\n")
    last = said.strip().split("\n")[-1]
    assert last.strip().startswith("11 engine: launch, read, step, run,")
    lines = said.strip().replace("\n        ", " ").split("\n")  # long ones go on below, indented
    counted = sum(len(line.split(": ")[1].split(", ")) for line in lines[1:])
    assert counted == number + 1


def test_a_finished_engine_is_said_to_be_finished():
    """Passed and not yet checked are both the learner's."""
    known = dict.fromkeys(ex.exercises(), "passed")
    known["engine.Engine.step"] = "yours"
    assert whose_engine(known) == (
        f"borrowed: 0. All {len(known)} exercises of the engine are yours."
    )


def test_a_fresh_process_imports_the_package_of_a_folder(tree):
    """Not that of the tree it was started from; an error comes with its last lines."""
    file = race.run_fresh("import minivllm; print(minivllm.__file__)", tree)
    assert file == str(tree / "minivllm" / "__init__.py")
    with pytest.raises(files.CourseError, match="ZeroDivisionError"):
        race.run_fresh("1 / 0", tree)


def test_a_race_runs_all_engines_on_the_same_work(tmp_path, monkeypatch):
    """The same tokens, a time for each round that counts, and no process is left running."""
    monkeypatch.setattr(race, "find_spec", lambda name: None)  # transformers takes seconds
    model = make_checkpoint(tmp_path / "model")
    setup = {"model_path": str(model), "max_batch": 2, "max_len": 32}
    setup |= {"settings": {"num_kv_blocks": 8, "attention_backend": "torch"}}
    results = race.race(setup, [[1, 2, 3], [4, 5, 6]], num_tokens=4, rounds=2)
    assert list(results) == ["yours", "ours"]
    assert results["yours"].token_ids == results["ours"].token_ids
    assert [len(answer) for answer in results["yours"].token_ids] == [4, 4]
    assert all(len(r.seconds) == 2 and min(r.seconds) > 0 for r in results.values())


def test_a_racer_that_dies_is_an_error(tmp_path, monkeypatch):
    """With what to do, instead of waiting forever."""
    monkeypatch.setattr(race, "find_spec", lambda name: None)
    with pytest.raises(files.CourseError, match="ended before it answered"):
        race.race({"model_path": str(tmp_path), "max_batch": 1, "max_len": 8}, [[1]], 1)


# -- the toy device --


def run_toy(step, answers):
    engine = toy_engine(answers)
    while engine.has_unfinished_requests:
        getattr(engine, step)()
    return engine


@pytest.mark.parametrize(("step", "end"), [("step", 25), ("step_overlapped", 17)])
def test_the_clock_counts_what_the_lesson_says(step, end):
    """Five steps: 1 + 3 + 1 ms each; overlapped 1 + 5 x 3 + 1 ms."""
    engine = run_toy(step, {"A": [5, 6, 0], "B": [7, 7, 7, 7, 7]})
    assert engine.runner.now == end
    assert max(work.end for work in engine.runner.log) == end


def test_a_wasted_step_is_marked():
    """The one behind a stop token; an answer that ends by its length has none."""
    steps = [
        [work.is_wasted for work in run_toy("step_overlapped", answers).runner.log
         if work.what == "compute"]
        for answers in ({"A": [5, 6, 0]}, {"A": [5, 6, 7]})
    ]  # fmt: skip
    assert steps == [[False, False, False, True], [False, False, False]]


# -- the lesson --

LESSON = (HOME / "course" / "lessons" / "11_engine.md").read_text("utf-8")


def test_every_rule_has_a_wrong_answer():
    """The comments of the library name the rules of the lesson."""
    rules = re.findall(r"^(\d)\. \*\*", LESSON, re.MULTILINE)
    library = (HOME / "course" / "mistakes" / "11_engine.py").read_text("utf-8")
    assert rules == [str(number) for number in range(1, 9)]
    assert set(re.findall(r"^# rule (\d)", library, re.MULTILINE)) == set(rules)
