"""Splicing: definitions are removed and put back, and all else stays byte for byte."""

import ast
import importlib.util
from pathlib import Path

import pytest

from course import splice

pytestmark = pytest.mark.course

MODULE = '''
import os

LIMIT = 8  # a constant


class Pool:
    """A pool."""

    size: int = 3

    @property
    def free(self):
        """How many."""
        return self._free

    @free.setter
    def free(self, value):
        self._free = value

    async def wait(self, a: dict = {"x": 1}, *, b=(1, 2)) -> int:  # why
        """Wait.

        For long.
        """
        text = """two
lines"""
        return len(text)
        # the last comment belongs to the body

    # this one does not


def one(x): return x + 1


if True:

    def guarded(x):
        def inner(y):
            return y

        return inner(x)
'''.lstrip("\n")
NAMES = ["LIMIT", "Pool", "Pool.size", "Pool.free", "Pool.wait", "one", "guarded"]
CRLF = MODULE.replace("\n", "\r\n")


def one_span(text, name):
    """The node of a definition that stands once."""
    (span,) = splice.find(text, name)
    return span.node


@pytest.mark.parametrize("text", [MODULE, CRLF, MODULE.replace("    ", "\t")])
@pytest.mark.parametrize("name", NAMES)
def test_putting_back_what_was_taken_changes_nothing(text, name):
    """Also with \\r\\n and with tabs."""
    assert splice.put(text, name, splice.take_all(text, name)) == text


@pytest.mark.parametrize("text", [MODULE, CRLF])
@pytest.mark.parametrize("name", ["Pool", "Pool.free", "Pool.wait", "one", "guarded"])
def test_solving_a_blanked_definition_gives_the_module_back(text, name):
    """Blank, lay the hole, lay the body again: the same bytes."""
    source = splice.take_all(text, name)
    open_text = splice.put(text, name, splice.blank(source))
    assert open_text != text
    assert splice.put(open_text, name, source) == text


@pytest.mark.parametrize(
    "module", ["textwrap", "dataclasses", "argparse", "typing", "asyncio.tasks"]
)
def test_definitions_of_real_modules_survive(module):
    """take and put on what others have written, a dozen of each module."""
    path = Path(importlib.util.find_spec(module).origin)
    text = path.read_bytes().decode()
    names = [n for node in ast.parse(text).body for n in splice.names_of(node)]
    for name in list(dict.fromkeys(names))[:: 1 + len(names) // 12]:
        assert splice.put(text, name, splice.take_all(text, name)) == text, name


def test_only_the_named_definition_changes():
    """One line differs, and it is the one meant."""
    after = splice.put(MODULE, "one", "def one(x):\n    return 2")
    assert after == MODULE.replace("def one(x): return x + 1", "def one(x):\n    return 2")


def test_a_method_is_found_in_its_class_only():
    """`free` of another class is another function."""
    text = "class A:\n    def f(self): return 1\nclass B:\n    def f(self): return 2\n"
    assert splice.put(text, "B.f", "def f(self): return 3") == text.replace("2", "3")


def test_a_property_and_its_setter_are_one():
    """Both are taken, both are put."""
    source = splice.take_all(MODULE, "Pool.free")
    assert source.count("def free") == 2
    with pytest.raises(ValueError, match="2 times in the module, 1 times here"):
        splice.put(MODULE, "Pool.free", "def free(self): return 1")


def test_blank_keeps_signature_docstring_and_decorator():
    """What says how vanishes: body, inner comments, the comment below."""
    assert splice.blank(splice.take_all(MODULE, "Pool.wait")) == (
        'async def wait(self, a: dict = {"x": 1}, *, b=(1, 2)) -> int:  # why\n'
        '    """Wait.\n\n    For long.\n    """\n    ...'
    )
    assert splice.blank("def one(x): return x + 1") == "def one(x):\n    ..."
    assert "@property" in splice.blank(splice.take_all(MODULE, "Pool.free"))


def test_strings_of_several_lines_are_never_moved():
    """To indent them would change their content."""
    source = 'def f():\n    x = """a\nb"""\n    return x'
    text = "class A:\n    def f(self): ...\n"
    space: dict = {}
    exec(splice.put(text, "A.f", source.replace("f()", "f(self)")), space)
    assert space["A"]().f() == "a\nb"


@pytest.mark.parametrize(
    "body", ["...", "pass", '"""Doc."""', '"""Doc."""\n    ...', "raise NotImplementedError('x')"]
)
def test_a_body_without_work_is_a_hole(body):
    """Whatever a learner leaves there for later."""
    assert splice.is_hole(one_span(f"def f():\n    {body}", "f"))


@pytest.mark.parametrize("body", ["return 1", "x = 1\n    ...", "return ...", "raise ValueError"])
def test_a_body_with_work_is_no_hole(body):
    """`...` left below the code is harmless."""
    assert not splice.is_hole(one_span(f"def f():\n    {body}", "f"))


def test_a_class_is_open_as_long_as_one_method_is():
    """And says which."""
    node = one_span("class A:\n    def f(self): return 1\n    def g(self): ...", "A")
    assert splice.is_hole(node)
    assert splice.open_methods(node) == ["g"]


def test_a_raise_below_finished_code_is_seen():
    """The commonest leftover."""
    left = one_span("def f():\n    x = 1\n    raise NotImplementedError", "f")
    assert splice.ends_in_raise(left)
    assert not splice.ends_in_raise(one_span("def f():\n    raise NotImplementedError", "f"))


def test_a_byte_order_mark_is_kept():
    """Some editors write one."""
    text = "\ufeff" + MODULE
    assert splice.put(text, "one", splice.take_all(text, "one")) == text


def test_a_module_that_would_not_compile_is_never_handed_out():
    """A half-written function stays out."""
    with pytest.raises(SyntaxError):
        splice.put(MODULE, "one", "def one(x:\n    return 1")
