"""The magics: what a learner types, sees, and can break, in a running kernel."""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from course_tree import tree  # noqa: F401
from IPython.core.interactiveshell import InteractiveShell

import course
from course import exercises as ex
from course import files, magics

pytestmark = pytest.mark.course

BLOCKS_FOR = "block_manager.blocks_for"
POOL = "block_manager.BlockPool"
MINE = f"""%%build {BLOCKS_FOR}
def blocks_for(num_tokens, block_size=16):
    return (num_tokens + 15) // block_size
"""
BOTH = f"""%%build {POOL}.allocate {POOL}.free
def allocate(self, num_blocks):
    return "mine"


def free(self, block_ids):
    return "mine too"
"""


class Kernel:
    """Cells run one after the other; what they print comes back."""

    def __init__(self, shell, capsys):
        self.shell, self.capsys = shell, capsys

    def run(self, source):
        """Run a cell; an exception that reaches the notebook is raised."""
        self.capsys.readouterr()
        result = self.shell.run_cell(source)
        result.raise_error()
        return self.capsys.readouterr().out.rstrip("\n")

    def value(self, expression):
        """The value of an expression in the notebook."""
        return self.shell.run_cell(expression).result


@pytest.fixture
def kernel(tree, capsys, monkeypatch):  # noqa: F811
    """A fresh kernel whose first cell has been run."""
    monkeypatch.delenv("MINIVLLM_COURSE_STRICT", raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(tree / "ipython"))
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    kernel = Kernel(shell, capsys)
    kernel.run("%load_ext course")
    kernel.run("from minivllm.block_manager import BlockPool, blocks_for, LIMIT")
    kernel.run("from minivllm.scheduler import Scheduler")
    kernel.run(
        "def fails(call):\n    try:\n        call()\n    except Exception as error:\n"
        "        return error"
    )
    yield kernel
    course.unload_ipython_extension(shell)
    InteractiveShell.clear_instance()


def module_text():
    """The module with the exercises, as it is now."""
    return files.read(files.module_path(BLOCKS_FOR))


def edit(old, new, module="block_manager"):
    """What an editor does."""
    path = files.root() / "minivllm" / f"{module}.py"
    text = files.read(path)
    assert old in text
    files.write(path, text.replace(old, new))


# -- %%build --


def test_a_build_reaches_the_engine(kernel):
    """File, names of the notebook, and the module that uses it."""
    assert kernel.run(MINE) == (
        f"Built {BLOCKS_FOR}: the engine now runs your version.\nNext: %check {BLOCKS_FOR}"
    )
    assert "(num_tokens + 15) // block_size" in module_text()
    assert kernel.value("blocks_for(33, 11)") == 4
    assert kernel.value("Scheduler(8).admit(33)") == [0, 1, 2]
    kernel.run(BOTH)
    assert kernel.value("Scheduler(8).admit(33)") == "mine"


def test_a_build_writes_nothing_but_what_the_cell_names(kernel):
    """All else byte for byte."""
    before, old = module_text(), ex.current(BLOCKS_FOR)
    kernel.run(MINE)
    assert module_text() == before.replace(old, ex.current(BLOCKS_FOR))


def test_short_names_build_too(kernel):
    """As long as they are unique."""
    assert "Built block_manager.blocks_for" in kernel.run(MINE.replace(BLOCKS_FOR, "blocks_for"))


def test_a_syntax_error_is_shown_with_line_and_caret_and_nothing_is_written(kernel):
    """Line 1 is the one with %%build."""
    before = module_text()
    text = kernel.run(f"%%build {BLOCKS_FOR}\ndef blocks_for(a, b)\n    return 1")
    assert text == (
        "Not written: SyntaxError in line 2: expected ':'\n"
        "    def blocks_for(a, b)\n"
        "                        ^"
    )
    assert module_text() == before


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 1", "'return' outside function"),
        ("def blocks_for(a):\n  x = 1\n   y = 2", "unexpected indent"),
        ("def blocks_for(a):\n    return 1\x00", "null bytes"),
        ("# nothing yet", "has no `blocks_for` in it"),
        ("def block_for(a): return 1", "has no `blocks_for` in it"),
        ("def blocks_for(a): return 1\ndef blocks_for(a): return 2", "in lines 2 and 3. Keep one"),
    ],
)
def test_other_cells_that_hold_no_function_are_refused(kernel, body, words):
    """Each with its reason, and nothing is written."""
    before = module_text()
    text = kernel.run(f"%%build {BLOCKS_FOR}\n{body}")
    assert text.startswith("Not written: ")
    assert words in text
    assert module_text() == before


def test_a_hole_is_not_written(kernel):
    """It says what is open, and whose version runs."""
    before = module_text()
    hole = (
        f'%%build {BLOCKS_FOR}\ndef blocks_for(num_tokens, block_size=16):\n    """Doc."""\n    ...'
    )
    words = f"Open: {BLOCKS_FOR}.\nReplace the `...` and run this cell again; until then "
    assert kernel.run(hole) == words + "our version runs."
    assert module_text() == before
    kernel.run(MINE)
    assert kernel.run(hole) == words + "your earlier version runs."


def test_of_a_cell_with_two_functions_the_finished_one_is_built(kernel):
    """The other one is named as open."""
    text = kernel.run(BOTH.replace('return "mine too"', "..."))
    assert f"Built {POOL}.allocate" in text
    assert f"Open: {POOL}.free" in text
    assert ex.states()[f"{POOL}.free"] == "borrowed"


@pytest.mark.parametrize("line", ["import math", "def helper(): return 1", "print(3)", "LIMIT = 9"])
def test_an_extra_line_is_refused_with_its_number(kernel, line):
    """Imports, helpers and experiments have other places."""
    before = module_text()
    text = kernel.run(MINE + f"\n{line}\n")
    assert text.startswith(f"Not written: line 5 (`{line}`) is not part of {BLOCKS_FOR}.\n")
    assert "helpers go inside the function" in text
    assert module_text() == before


def test_an_import_that_fails_is_rolled_back(kernel):
    """File, ledger and running code are as before."""
    kernel.run(MINE)
    before = module_text()
    text = kernel.run(MINE.replace("def blocks_for", "@undefined\ndef blocks_for"))
    assert text == (
        "Not written: the module cannot be imported with it: "
        "NameError: name 'undefined' is not defined"
    )
    assert module_text() == before
    assert kernel.value("blocks_for(33, 11)") == 4
    assert ex.states()[BLOCKS_FOR] == "yours"
    assert "minivllm.block_manager" in sys.modules
    assert kernel.run("%undo blocks_for").endswith("our version is back (0 more to undo).")


@pytest.mark.parametrize(
    ("first_line", "words"),
    [
        ("def blocks_for(n, block_size=16):", "its parameter 1 is `n`, and must be `num_tokens`"),
        ("def blocks_for(num_tokens):", "its parameter `block_size` is missing"),
        ("def blocks_for(num_tokens, block_size):", "`block_size` must have the default 16"),
        ("async def blocks_for(num_tokens, block_size=16):", "not `async def`"),
        ("def blocks_for(num_tokens, block_size=16, *, more):", "`more` is one too many"),
        ("@staticmethod\ndef blocks_for(num_tokens, block_size=16):", "`@staticmethod` above"),
    ],
)
def test_another_signature_is_refused_at_the_build_with_the_right_one(kernel, first_line, words):
    """Its callers would fail, and a check would blame the body."""
    before = module_text()
    text = kernel.run(f"%%build {BLOCKS_FOR}\n{first_line}\n    return 1")
    assert words in text and "    def blocks_for(num_tokens, block_size=16):" in text
    assert module_text() == before


@pytest.mark.parametrize(
    "first_line",
    [
        "def blocks_for(num_tokens: int, block_size: int = 16) -> int:",
        "def blocks_for(num_tokens, block_size=16, verbose=False):",
        "def blocks_for(num_tokens, block_size=16, *more, **others):",
    ],
)
def test_annotations_and_optional_parameters_are_the_learners_business(kernel, first_line):
    """Callers do not notice."""
    text = kernel.run(f"%%build {BLOCKS_FOR}\n{first_line}\n    return 1")
    assert text.startswith("Built block_manager.blocks_for")


def test_a_comment_above_the_magic_is_no_obstacle(kernel):
    """IPython wants %%build in the first line; editors write `#%%` above it."""
    text = kernel.run("#%%\n# my second try\n\n" + MINE)
    assert text.startswith("Built block_manager.blocks_for")


def test_a_check_notes_an_answer_in_a_cell_without_build(kernel):
    """Its ✓ is for the version in the package."""
    kernel.run(MINE)
    own = MINE.split("\n", 1)[1]
    kernel.run(own)
    assert "Note" not in kernel.run("%check blocks_for")
    kernel.run(own.replace("+ 15", "+ 99"))
    text = kernel.run("%check blocks_for")
    assert "a cell without %%build defines another `blocks_for`" in text
    assert "✓ blocks_for" in text


@pytest.mark.parametrize("damage", ["deleted", "Latin-1"])
def test_a_module_that_cannot_be_read_is_told_with_its_remedy(kernel, damage):
    """No traceback, whatever the magic."""
    path = files.module_path(BLOCKS_FOR)
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + "# café\n".encode("latin-1"))
    for line in ("%check blocks_for", "%restore blocks_for", "%progress", MINE):
        text = kernel.run(line)
        assert "block_manager.py cannot be read" in text, line
        assert "git checkout minivllm/block_manager.py" in text


def test_a_name_that_the_module_lacks_is_noted(kernel):
    """At once, not at the first call."""
    text = kernel.run(MINE.replace("(num_tokens + 15)", "ceil_of(num_tokens)"))
    assert "Note: `ceil_of` is not defined in block_manager.py; define or import it inside" in text


def test_a_wrong_name_is_answered_with_the_right_one(kernel):
    """In every magic."""
    for magic in ("%%build", "%check", "%restore", "%undo"):
        text = kernel.run(f"{magic} blokcs_for" + "\n# body" * magic.startswith("%%"))
        assert text == f"No exercise is called 'blokcs_for'. Did you mean {BLOCKS_FOR}?"
        assert "which exercise?" in kernel.run(magic + "\n# body" * magic.startswith("%%"))


def test_windows_line_ends_in_a_cell_are_fine(kernel):
    """Some front ends send them."""
    assert kernel.run(MINE.replace("\n", "\r\n")).startswith("Built")
    assert b"\r" not in files.module_path(BLOCKS_FOR).read_bytes()


# -- what is live moves to the new code --


def test_live_objects_run_the_new_code(kernel):
    """The pool made before, in a variable, in a dict, inside another object; and subclasses."""
    kernel.run("pool, inside, scheduler = BlockPool(4), {'x': BlockPool(4)}, Scheduler(4)")
    kernel.run("class Mine(BlockPool): pass\nmine = Mine(4)")
    kernel.run(BOTH)
    for name in ("pool", "inside['x']", "scheduler.pool", "mine"):
        assert kernel.value(f"{name}.allocate(1)") == "mine", name
    assert kernel.value("isinstance(pool, BlockPool) and type(scheduler) is Scheduler")


def test_stored_functions_run_the_new_code(kernel):
    """A bound method, a partial, a list, a default argument, an alias of the module."""
    kernel.run("from functools import partial\nimport minivllm.block_manager as bm")
    kernel.run("from minivllm import block_manager\nold, pool = blocks_for, BlockPool(4)")
    kernel.run("stored = [blocks_for, partial(blocks_for, 33), bm.blocks_for, pool.allocate]")
    kernel.run("def later(n, f=blocks_for): return f(n)")
    kernel.run(MINE.replace("return", "return 100 +"))
    kernel.run(BOTH)
    assert kernel.value("stored[0](33), stored[1](), stored[2](33), later(33)") == (103,) * 4
    assert kernel.value("stored[3](1)") == "mine"
    assert kernel.value("old is blocks_for is bm.blocks_for and bm is block_manager")


@pytest.mark.parametrize(
    "decorators",
    ["@functools.cache", "@contextlib.contextmanager", "@counted", "@counted\n@counted"],
)
def test_a_decorator_may_come_and_go(kernel, decorators):
    """What holds the function from before runs each version in turn."""
    edit("from collections import deque", "from collections import deque\n" + DECORATOR)
    kernel.run("first = blocks_for")
    plain = "def blocks_for(num_tokens, block_size=16):\n    return {}\n"
    is_manager = "contextmanager" in decorators
    decorated = plain.replace("return", "yield") if is_manager else plain
    for number, source in enumerate([decorators + "\n" + decorated, plain] * 2):
        kernel.run(f"%%build {BLOCKS_FOR}\n{source.format(number)}")
        kernel.run("second = blocks_for")
        for name in ("first", "second", "blocks_for"):
            call = f"{name}(33).__enter__()" if is_manager and number % 2 == 0 else f"{name}(33)"
            assert kernel.value(call) == number


DECORATOR = """
import contextlib, functools


def counted(function):
    @functools.wraps(function)
    def call(*arguments, **keywords):
        return function(*arguments, **keywords)
    return call
"""

SHAPES = """

@dataclass(frozen=True)
class Frozen:
    size: int
    def area(self): return self.size

@dataclass(slots=True)
class Slots(Base):
    size: int
    @property
    def area(self): return self.size
    @classmethod
    def make(cls): return cls(1)
    @staticmethod
    def two(): return 2

class Child(Base):
    def name(self): return super().name() + "1"

TABLE = {"slots": Slots}
"""


def test_every_kind_of_class_keeps_its_objects(kernel):
    """Frozen and slotted dataclasses, properties, super(), class and static methods, registries."""
    head = "from dataclasses import dataclass\n\nclass Base:\n    def name(self): return 'b'\n"
    edit("class BlockPool:", head + SHAPES + "\n\nclass BlockPool:")
    kernel.run("from minivllm.block_manager import Frozen, Slots, TABLE, Base, Child")
    kernel.run(
        "frozen, slots, two, make = Frozen(3), Slots(3), Slots.two, Slots.make\nchild = Child()"
    )
    for old, new in (
        ("area(self): return self.size", "area(self): return self.size + 1"),
        ("return cls(1)", "return cls(7)"),
        ("return 2", "return 22"),
        ('name() + "1"', 'name() + "2"'),
        ("return 'b'", "return 'c'"),
    ):
        edit(old, new)
    kernel.run("pass")
    assert kernel.value("frozen.area(), slots.area, two(), make().size, child.name()") == (
        (4, 4, 22, 7, "c2")
    )
    assert kernel.value("isinstance(slots, Base) and TABLE['slots'] is Slots is type(make())")
    assert "FrozenInstanceError" in kernel.value(
        "str(type(fails(lambda: setattr(frozen, 'size', 1))))"
    )
    edit(
        "class Slots(Base):\n    size: int", "class Slots(Base):\n    size: int\n    more: int = 0"
    )
    assert "minivllm.block_manager.Slots has another layout now" in kernel.run("pass")


def test_modules_keep_their_identity(kernel):
    """Also those in rooms, under every name that an import gives them."""
    kernel.run("from minivllm.cpu import ops as cpu_ops\nfrom minivllm import cpu, block_manager")
    kernel.run("import minivllm.cpu.ops\nold = cpu_ops.need")
    edit("return 2 * blocks_for", "return 3 * blocks_for", module="cpu/ops")
    edit("FACTOR = 1", "FACTOR = 10", module="cpu/ops")
    text = kernel.run(
        "value = cpu_ops.need(33), old(33), cpu.ops.need(33), minivllm.cpu.ops.FACTOR"
    )
    assert text == "Imported again, changed on disk: cpu.ops."
    assert kernel.value("value") == (9, 9, 9, 10)
    assert kernel.value("cpu.FACTOR") == 10, "a module that imports a constant runs again, too"
    kernel.run(MINE.replace("return", "return 100 +"))
    assert kernel.value("cpu_ops.need(33)") == 309
    edit("return 3 *", "return 3 3", module="cpu/ops")
    assert "git checkout minivllm/cpu/ops.py" in kernel.run("pass")


def test_a_change_in_an_editor_arrives_before_the_next_cell(kernel):
    """Function and constant, said in one line."""
    edit("-(-num_tokens // block_size)", "99")
    edit("LIMIT = 8", "LIMIT = 12")
    assert kernel.run("print(blocks_for(1), LIMIT)") == (
        "Imported again, changed on disk: block_manager.\n99 12"
    )
    assert kernel.run("print(blocks_for(1))") == "99"


def test_another_notebooks_build_arrives_before_the_next_cell(kernel):
    """Written by another process as far as this kernel knows."""
    source = "def blocks_for(num_tokens, block_size=16):\n    return 5"
    ex.lay({BLOCKS_FOR: source}, mine=True)
    assert kernel.run("print(blocks_for(1))").endswith("5")
    assert kernel.run("%progress").count("◧") == 3


def test_a_module_that_does_not_compile_is_told_with_its_remedy(kernel):
    """The kernel goes on with the old code, and each magic says what to do."""
    kernel.run("pool = BlockPool(4)")
    edit("class BlockPool:", "class BlockPool")
    text = kernel.run("print(pool.allocate(1))")
    assert "cannot be imported: block_manager (SyntaxError" in text
    assert "git checkout minivllm/block_manager.py" in text
    assert text.endswith("[0]")
    for cell in ("%check blocks_for", "%restore blocks_for", "%progress", MINE):
        assert "git checkout minivllm/block_manager.py" in kernel.run(cell)
    edit("class BlockPool\n", "class BlockPool:\n")
    assert kernel.run("print(pool.allocate(1))").endswith("[1]")


# -- %check, %restore, %undo, %progress --


def test_a_failure_is_shown_and_the_notebook_goes_on(kernel):
    """Run All reaches the end."""
    assert kernel.run("%check blocks_for").startswith(f"Open: {BLOCKS_FOR} is still borrowed")
    kernel.run(MINE.replace("+ 15", "+ 99"))
    assert kernel.run("%check blocks_for").startswith("✗ blocks_for: ")
    kernel.run(MINE)
    assert kernel.run("%check blocks_for") == (
        "✓ blocks_for: 3 of 3 tests pass. It is yours.\n01 blocks  ■□□  1 of 3 yours\n"
        "Next: exercise 2, BlockPool.allocate"
    )


def test_under_pytest_a_failure_is_raised(kernel, monkeypatch):
    """nbval must see it; a hole in a build cell alone is not a failure."""
    monkeypatch.setenv("MINIVLLM_COURSE_STRICT", "1")
    with pytest.raises(files.OpenExercise, match="still borrowed"):
        kernel.run("%check blocks_for")
    with pytest.raises(files.BuildError, match="expected ':'"):
        kernel.run(f"%%build {BLOCKS_FOR}\ndef blocks_for(a)\n")
    assert kernel.run(f"%%build {BLOCKS_FOR}\ndef blocks_for(a): ...").startswith("Open: ")
    kernel.run(MINE.replace("+ 15", "+ 99"))
    with pytest.raises(files.CheckFailed, match="✗ blocks_for"):
        kernel.run("%check blocks_for")


def test_an_error_of_the_course_is_its_text_alone():
    """No traceback of ours in the notebook."""
    assert files.CheckFailed("a\nb")._render_traceback_() == ["a\nb"]


def test_restore_and_undo_are_each_others_way_back(kernel):
    """Ours, yours, ours."""
    before = module_text()
    kernel.run(MINE)
    assert kernel.run("%restore blocks_for") == (
        f"Restored {BLOCKS_FOR}: the engine runs our version. %undo {BLOCKS_FOR} brings yours back."
    )
    assert module_text() == before
    assert kernel.run("%undo blocks_for") == (
        f"{BLOCKS_FOR}: your earlier version is back (1 more to undo)."
    )
    assert kernel.value("blocks_for(33, 11)") == 4
    kernel.run("%undo blocks_for")
    assert module_text() == before
    assert kernel.run("%undo blocks_for") == (
        f"Nothing to undo: {BLOCKS_FOR} has no earlier version."
    )


def test_undo_says_if_its_version_was_there_already(kernel):
    """After git checkout, say."""
    before = module_text()
    kernel.run(MINE)
    files.write(files.module_path(BLOCKS_FOR), before)
    text = kernel.run("%undo blocks_for")
    assert text.endswith("our version was there already (0 more to undo).")


def test_restore_all_gives_the_package_back(kernel):
    """Every exercise, also those removed for an editor."""
    before = module_text()
    assert kernel.run("%restore --all") == "Nothing to restore: every exercise is ours."
    kernel.run(MINE)
    kernel.run(BOTH)
    ex.open_in_file(ex.find_exercise(BLOCKS_FOR))
    assert kernel.run("%restore --all").count("Restored") == 3
    assert module_text() == before


def test_progress_is_the_map(kernel):
    """Chapters, exercises, what is still borrowed."""
    kernel.run(MINE)
    assert kernel.run("%progress") == (
        "01 blocks  ◧□□  1 of 3 yours, 1 not checked\n"
        "    ◧ blocks_for\n    □ BlockPool.allocate\n    □ BlockPool.free\n"
        "1 of 3 exercises are yours; borrowed: 2\n"
        "■ passed   ◧ yours, not checked   □ borrowed   · open"
    )


# -- the life of a notebook --


def test_cells_may_be_run_twice_and_in_any_order(kernel):
    """A copy of a build cell changes nothing; the last one run counts."""
    kernel.run(BOTH)
    kernel.run(MINE)
    text = module_text()
    kernel.run(MINE)
    kernel.run(BOTH)
    assert module_text() == text
    assert kernel.run("%undo blocks_for").endswith("(0 more to undo).")


def test_loading_again_leaves_one_hook(kernel):
    """%reload_ext is harmless."""
    kernel.run("%reload_ext course")
    edit("LIMIT = 8", "LIMIT = 9")
    assert kernel.run("pass").count("Imported again") == 1


def test_a_package_that_cannot_be_written_is_told(kernel, monkeypatch):
    """A message, no traceback, nothing changed."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    before = module_text()
    monkeypatch.setattr(files.tempfile, "mkstemp", refuse)
    assert kernel.run(MINE).startswith("Not written: ")
    monkeypatch.undo()
    assert module_text() == before


def notebook(cells):
    """A notebook of code cells."""
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    return nbformat.v4.new_notebook(cells=made)


def run_in_jupyter(tree, cells, strict=False):  # noqa: F811
    """Run cells in a kernel of their own; what each printed."""
    from nbclient import NotebookClient

    tools = Path(files.__file__).resolve().parents[1]
    setup = f"from course import files; from pathlib import Path; files.HOME = Path({str(tree)!r})"
    nb = notebook([setup, "%load_ext course", *cells])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tools)])}
    env |= {"MINIVLLM_COURSE_STRICT": "1"} if strict else {}
    client = NotebookClient(nb, timeout=120, kernel_name="python3")
    client.execute(env=env, cwd=str(tree))
    outputs = [cell.outputs for cell in nb.cells[2:]]
    return ["".join(map(text_of, cell)).strip() for cell in outputs]


def text_of(output):
    """What an output says without colours."""
    text = output.get("text", "") or output.get("data", {}).get("text/plain", "")
    return re.sub(r"\x1b\[\d+m", "", text)


def test_jupyter_runs_all_cells_and_a_new_kernel_knows_what_was_built(tree):  # noqa: F811
    """Failures in the middle, then a restart with the work of before."""
    use = "from minivllm.block_manager import blocks_for\nprint(blocks_for(33, 11))"
    first = run_in_jupyter(tree, ["%check blocks_for", MINE, "%check blocks_for", use])
    assert first[0].startswith("Open: ")
    assert first[1].startswith("Built ")
    assert first[2].startswith("✓ blocks_for")
    assert first[3] == "4"
    second = run_in_jupyter(tree, [use, "%progress"])
    assert second[0] == "4"
    assert second[1].startswith("01 blocks  ■□□  1 of 3 yours")
    book = json.loads((tree / ".course" / "ledger.json").read_text())
    assert list(book) == [BLOCKS_FOR]


def test_jupyter_under_pytest_stops_with_our_words(tree):  # noqa: F811
    """What nbval shows of a failed check."""
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError) as error:
        run_in_jupyter(tree, ["%check blocks_for"], strict=True)
    assert "still borrowed" in str(error.value)
    assert "Traceback" not in str(error.value)


def test_undefined_names_are_found_in_every_form_of_function(kernel):
    """Properties, nested functions; builtins and module names are known."""
    source = (
        "@property\ndef num_free(self):\n    return [missing(x) for x in deque(len(self.free_ids))]"
    )
    files.write(files.module_path(POOL), ex.splice.put(module_text(), "BlockPool.num_free", source))
    kernel.run("pass")
    importlib.import_module("minivllm.block_manager")
    assert magics.undefined_names(f"{POOL}.num_free") == ["missing"]


def test_marks_are_coloured_in_a_notebook_and_nowhere_else(kernel):
    """JupyterLab shows the codes as colours; a log would show them as they are."""
    kernel.run(MINE.replace("+ 15", "+ 99"))
    assert "\x1b" not in kernel.run("%check blocks_for")
    kernel.shell.kernel = object()  # what the shell of a notebook has
    try:
        assert kernel.run("%check blocks_for").startswith("\x1b[31m✗ blocks_for: ")
        kernel.run(MINE)
        assert kernel.run("%check blocks_for").startswith("\x1b[32m✓ blocks_for: ")
    finally:
        del kernel.shell.kernel
