"""Checks: the learner's code is run with limits, and the words say what was wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from course_tree import put, tree  # noqa: F401

from course import check, files, progress, verdict
from course import exercises as ex
from course.authoring import mistakes

BLOCKS_FOR = "block_manager.blocks_for"
ALLOCATE = "block_manager.BlockPool.allocate"
FREE = "block_manager.BlockPool.free"

pytestmark = [pytest.mark.course, pytest.mark.usefixtures("tree")]


def blocks_for(body):
    """A version of blocks_for with this body."""
    return "def blocks_for(num_tokens, block_size=16):\n    " + body.replace("\n", "\n    ")


def checked(name, source):
    """What the check of this version says."""
    ex.lay({name: source}, mine=True)
    try:
        return verdict.check(name)
    except files.CourseError as error:
        return str(error)


def judged(name, source):
    """The same without the run that says where the cause is."""
    ex.lay({name: source}, mine=True)
    events = check.run_tests(name, files.root())
    return verdict.verdict(name, events, files.root())


# -- what is checked --


@pytest.mark.parametrize("number", [0, 1])
def test_a_hole_and_a_borrowed_function_fail_their_check(number):
    """Nothing done, nothing passed: the tests would pass on ours."""
    if number:
        ex.open_in_file(ex.find_exercise(BLOCKS_FOR))
    with pytest.raises(
        files.OpenExercise, match=f"Open: {BLOCKS_FOR}.*{['borrowed', 'hole'][number]}"
    ):
        verdict.check(BLOCKS_FOR)
    assert ex.states()[BLOCKS_FOR] != "passed"


@pytest.mark.parametrize(
    "body",
    [
        "return (num_tokens + block_size - 1) // block_size",
        "import math\nreturn math.ceil(num_tokens / block_size)",
        "count = 0\nwhile count * block_size < num_tokens:\n    count += 1\nreturn count",
        "return 0 if num_tokens <= 0 else 1 + blocks_for(num_tokens - block_size, block_size)",
        "def half(n):\n    return divmod(n, block_size)\nfull, rest = half(num_tokens)\n"
        "return full + (rest > 0)",
    ],
)
def test_other_right_answers_pass(body):
    """Another formula, an import, a loop, recursion, a helper inside."""
    assert checked(BLOCKS_FOR, blocks_for(body)) == (
        "✓ blocks_for: 3 of 3 tests pass. It is yours.\n01 blocks  ■□□  1 of 3 yours\n"
        "Next: exercise 2, BlockPool.allocate"
    )
    assert ex.states()[BLOCKS_FOR] == "passed"


def test_a_wrong_answer_is_told_call_result_expectation_and_cause():
    """The form that the whole course has."""
    assert checked(BLOCKS_FOR, blocks_for("return int(num_tokens / block_size)")) == (
        "✗ blocks_for: a partial block counts as a whole one\n"
        "    called    blocks_for(33, 16)\n"
        "    came back 2\n"
        "    expected  3\n"
        "    likely    the 33rd token needs a third block\n"
        "2 of 3 tests pass. The tests: tests/test_block_manager.py"
    )
    assert ex.states()[BLOCKS_FOR] == "yours"


def test_variables_in_the_call_are_shown_with_their_values():
    """`blocks_for(num_tokens, 16)` of a parametrized test."""
    _, text = judged(BLOCKS_FOR, blocks_for("return num_tokens // block_size + 1"))
    assert "called    blocks_for(0, 16)\n    came back 1\n    expected  0" in text
    assert "likely    nothing is left over" in text


def test_a_look_at_the_state_shows_the_call_before_it():
    """Where the assert does not call the exercise itself."""
    _, text = judged(ALLOCATE, "def allocate(self, n):\n    return list(range(n))")
    assert "    called    pool.allocate(2)\n    looked at pool.counts\n" in text
    assert "    found     [0, 0, 0, 0]\n    expected  [1, 1, 0, 0]\n" in text


def test_an_exception_that_did_not_come_is_told():
    """pytest.raises in the learner's words."""
    source = (
        "def allocate(self, num_blocks):\n"
        "    taken = list(self.free_ids)[:num_blocks]\n"
        "    for i in taken:\n        self.free_ids.remove(i)\n        self.counts[i] = 1\n"
        "    return taken"
    )
    _, text = judged(ALLOCATE, source)
    assert (
        "called    pool.allocate(3)\n    came back no exception\n    expected  ValueError" in text
    )


def test_a_failed_invariant_names_the_call():
    """An assertion inside the package is shown like an exception."""
    source = (
        "def free(self, block_ids):\n    for i in block_ids:\n        self.counts[i] -= 1\n"
        "        if self.counts[i] == 0:\n            self.free_ids.append(i)\n"
        "    self.counts[0] = 3 if self.num_free == 2 else self.counts[0]"
    )
    _, text = judged(FREE, source)
    assert "raised    AssertionError: block 0: count 3" in text
    assert "at        block_manager.py:" in text


def test_an_exception_is_told_with_its_line_and_what_was_printed():
    """NameError in the middle of the learner's code."""
    _, text = judged(BLOCKS_FOR, blocks_for("print('debug', num_tokens)\nreturn nothing"))
    assert "    raised    NameError: name 'nothing' is not defined\n" in text
    assert "    at        block_manager.py:10: return nothing\n" in text
    assert "    printed   debug 33\n" in text


def test_a_raise_left_below_the_code_is_told():
    """The commonest leftover in a file."""
    _, text = judged(BLOCKS_FOR, blocks_for("x = 1\nraise NotImplementedError"))
    assert (
        "likely    `raise NotImplementedError` is still below your code: delete that line" in text
    )


def test_a_failure_says_where_the_cause_is_if_it_is_elsewhere():
    """`allocate` is wrong, `free` is blamed by its test, and right by itself."""
    ex.lay({ALLOCATE: "def allocate(self, n):\n    return [self.free_ids.popleft()]"}, mine=True)
    text = checked(FREE, ex.find_exercise(FREE).reference)
    assert text.endswith("passes when all else is ours, so the cause is in BlockPool.allocate.")


def test_the_cause_is_not_sought_elsewhere_if_it_is_here():
    """Both wrong: each is told its own."""
    ex.lay({ALLOCATE: "def allocate(self, n):\n    return []"}, mine=True)
    assert "the cause is in" not in checked(FREE, "def free(self, block_ids):\n    return 1")


# -- what must be suffered by the process, not by the learner --


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os\nos._exit(0)", "ended in the middle of .*exit code 0.*os._exit"),
        ("import ctypes\nctypes.string_at(0)", "ended in the middle of .*exit code -11"),
        ("import sys\nsys.exit(0)", "raised    SystemExit: 0"),
        ("raise KeyboardInterrupt", "ended in the middle of"),
        ("return blocks_for(num_tokens, block_size)", "RecursionError.*\n.*\n.*never stops"),
        ("import pytest\npytest.skip('no')", "raised    Skipped: no"),
        ("x = bytearray(1 << 34)", "raised    MemoryError.*\n.*\n    likely    a list that grows"),
        (
            "while True:\n    print('x' * 100_000)",
            "File too large.*\n.*\n    likely    a loop that p",
        ),
    ],
)
def test_code_that_ends_the_process_fails_its_check(body, words):
    """os._exit, segfault, sys.exit, interrupt, recursion, skip, memory, output without end."""
    ok, text = judged(BLOCKS_FOR, blocks_for(body))
    assert not ok
    assert re.search(words, text), text


def test_an_endless_loop_is_ended_and_its_line_named(monkeypatch):
    """Also one that catches everything."""
    monkeypatch.setattr(check, "TEST_LIMIT", 1)
    body = (
        "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass"
    )
    ok, text = judged(BLOCKS_FOR, blocks_for(body))
    assert not ok
    assert "did not end within" in text
    assert "it was in blocks_for, block_manager.py:1" in text
    assert "likely    a loop whose condition never changes" in text


def test_children_and_threads_are_gone_after_a_check():
    """They neither keep the check nor live on."""
    body = (
        "import subprocess, sys, threading, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(83.25)'])\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "return -(-num_tokens // block_size)"
    )
    start = time.monotonic()
    ok, text = judged(BLOCKS_FOR, blocks_for(body))
    assert ok, text
    assert time.monotonic() - start < 30
    if sys.platform == "linux":
        # It was killed, but on a busy machine it takes its time to go.
        end = time.monotonic() + 10
        while still_there(b"sleep(83.25)") and time.monotonic() < end:
            time.sleep(0.1)
        assert not still_there(b"sleep(83.25)")


def still_there(text):
    """The command lines of running processes that have `text` in them."""
    lines = [read_command(folder) for folder in Path("/proc").glob("[0-9]*")]
    return [line for line in lines if text in line]


def read_command(folder):
    """The command line of a running process, empty if it is gone or a zombie."""
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""


def test_the_package_under_test_is_the_learners(tree, tmp_path):  # noqa: F811
    """Not one that stands earlier on the path or in the working directory."""
    put(tmp_path / "other" / "minivllm" / "__init__.py", "")
    put(tmp_path / "other" / "minivllm" / "block_manager.py", "def blocks_for(a, b): return 0")
    before = os.getcwd()
    os.environ["PYTHONPATH"] = str(tmp_path / "other")
    os.chdir(tmp_path / "other")
    try:
        events = check.run_tests(BLOCKS_FOR, tree)
    finally:
        os.chdir(before)
        del os.environ["PYTHONPATH"]
    assert verdict.verdict(BLOCKS_FOR, events, tree)[0]
    done = next(event for event in events if event["event"] == "done")
    assert done["package"] == str(tree / "minivllm" / "block_manager.py")
    assert not done["torch"]


def test_a_path_may_hold_brackets_and_colons(tree, tmp_path):  # noqa: F811
    """pytest reads "::" and "[" as parts of a test's name, and PYTHONPATH ends at ":"."""
    folder = tmp_path / "work [x]::y"
    shutil.copytree(tree, folder)
    ok, message = verdict.verdict(BLOCKS_FOR, check.run_tests(BLOCKS_FOR, folder), folder)
    assert ok, message


def test_another_package_is_refused(tree):  # noqa: F811
    """If all precautions failed, it says so."""
    events = check.run_tests(BLOCKS_FOR, tree)
    done = next(event for event in events if event["event"] == "done")
    done["package"] = "/elsewhere/minivllm/block_manager.py"
    ok, text = verdict.verdict(BLOCKS_FOR, events, tree)
    assert not ok
    assert "imported /elsewhere" in text


def test_every_collected_test_must_have_passed(tree):  # noqa: F811
    """A report with a gap, without an end, or of nothing is not a pass."""
    events = check.run_tests(BLOCKS_FOR, tree)
    kinds = [event["event"] for event in events]
    assert kinds == ["collected"] + ["start", "pass"] * 3 + ["done", "end"]
    for missing in (0, 2, 7):
        rest = events[:missing] + events[missing + 1 :]
        assert not verdict.verdict(BLOCKS_FOR, rest, tree)[0]
    empty = [{"event": "collected", "tests": []}, events[-2], events[-1]]
    assert "no test in" in verdict.verdict(BLOCKS_FOR, empty, tree)[1]


def test_tests_that_cannot_start_say_why(tree):  # noqa: F811
    """The module does not even import."""
    path = tree / "minivllm" / "block_manager.py"
    path.write_text("import nothing_of_this_name\n" + path.read_text())
    ok, text = verdict.verdict(BLOCKS_FOR, check.run_tests(BLOCKS_FOR, tree), tree)
    assert not ok
    assert "nothing_of_this_name" in text


def test_what_cannot_be_checked_here_says_so(tree):  # noqa: F811
    """All tests skipped by their own marks is neither right nor wrong."""
    path = tree / "tests" / "test_block_manager.py"
    path.write_text(
        "import pytest\npytestmark = pytest.mark.skip(reason='needs Linux')\n" + path.read_text()
    )
    ok, text = verdict.verdict(BLOCKS_FOR, check.run_tests(BLOCKS_FOR, tree), tree)
    assert (ok, text) == (False, "✗ blocks_for: it cannot be checked on this machine: needs Linux")


def test_a_check_leaves_nothing_in_the_tree(tree):  # noqa: F811
    """No caches, no reports: `git status` shows the learner's code alone."""

    def seen_by_git():
        ignored = {".course", "__pycache__"}
        return sorted(path for path in tree.rglob("*") if not ignored & set(path.parts))

    before = seen_by_git()
    checked(BLOCKS_FOR, blocks_for("return 7"))
    assert seen_by_git() == before


def test_an_interrupted_check_leaves_no_process(monkeypatch):
    """The learner presses stop."""
    monkeypatch.setattr(subprocess.Popen, "wait", interrupt_once(subprocess.Popen.wait))
    assert checked(BLOCKS_FOR, blocks_for("while True: pass")) == (
        f"Stopped {BLOCKS_FOR}: nothing was recorded."
    )


def interrupt_once(wait):
    """A wait whose first call is interrupted."""
    calls = []

    def waiting(process, timeout=None):
        calls.append(process)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return wait(process, timeout)

    return waiting


# -- the library of wrong answers, the map --


def test_wrong_answers_are_read_and_never_run(tmp_path):
    """Names, words and sources, in order."""
    put(
        tmp_path / "x.py",
        '@mistake("a.b", "why?")\n@other\ndef b():\n    1 / 0\n\nraise SystemExit\n',
    )
    found = mistakes.read_mistakes(tmp_path / "x.py")
    assert found == [mistakes.Mistake("a.b", "why?", "@other\ndef b():\n    1 / 0")]
    assert mistakes.read_mistakes(tmp_path / "none.py") == []


def test_the_map_shows_each_state_with_its_sign():
    """passed, yours, borrowed; and what is still borrowed, counted."""
    states = dict(zip(ex.exercises(), ["passed", "yours", "borrowed"]))
    assert progress.chapter_line("01_blocks", states) == (
        "01 blocks  ■◧□  2 of 3 yours, 1 not checked"
    )
    assert progress.progress_map(states).split("\n")[-2] == (
        "2 of 3 exercises are yours; borrowed: 1"
    )
    assert progress.progress_map({}) == "There are no exercises yet."


def test_a_control_plane_check_needs_no_torch():
    """The real tests of the block manager: what keeps a check under a second."""
    code = (
        "import sys, json; sys.path.insert(0, 'tests'); import test_block_manager\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    home = Path(ex.__file__).resolve().parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=home, capture_output=True, text=True)
    assert json.loads(out.stdout) is False, out.stderr
