"""What a failed test shows: what was called, what came back, what was expected.

pytest's own explanation has the values; the text of the call is read from the test's source,
with the values of plain variables put in: `blocks_for(n, 16)` becomes `blocks_for(33, 16)`.
"""

from __future__ import annotations

import ast
import re
import traceback
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

MAX_TEXT = 200  # characters of a value
PLAIN = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True)
class Compared:
    """The two sides of a failed comparison."""

    op: str
    left: str
    right: str


def compared(op: str, left: object, right: object) -> Compared:
    """Both sides as text, at once: later the objects may have changed."""
    return Compared(op, text_of(left), text_of(right))


def text_of(value: object) -> str:
    """`repr`, shortened, without addresses, which differ in each run."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return _shorten(re.sub(r" at 0x[0-9a-f]+", "", text))


def cause(error: BaseException) -> BaseException:
    """Triton's interpreter wraps what happened on a line of the kernel."""
    while type(error).__name__ == "InterpreterError" and error.__cause__:
        error = error.__cause__
    return error


def in_package(error: BaseException, root: str) -> bool:
    """Whether the exception comes out of the package's code."""
    return _last_frame(error, str(Path(root, "minivllm"))) is not None


def explain(
    error: BaseException, test_file: Path, root: str, name: str, sides: Compared | None
) -> dict[str, Any]:
    """What the learner shall see of an exception that ended a test.

    kind and text of the exception, hint (the words of the assert), called, looked, came,
    expected, where (file:line and its text in the package), line (in the test).
    """
    inside = _last_frame(error, str(Path(root, "minivllm")))
    shown: dict[str, Any] = {
        "kind": type(error).__name__,
        "text": str(error)[:2000],
        "where": _place(inside) if inside else None,
    }
    found = _last_frame(error, str(test_file))
    if found is None:
        return shown
    frame, line = found
    statement = _statement_at(test_file, line)
    shown |= {"line": line, "called": _called(statement, test_file, line, name, frame)}
    if isinstance(statement, ast.Assert) and not inside and isinstance(error, AssertionError):
        shown |= _of_assert(statement, str(error), name, frame, sides)
    elif isinstance(statement, ast.With) and not inside:
        shown |= _of_raises(str(error))
    return shown


def _of_assert(
    statement: ast.Assert, text: str, name: str, frame: FrameType, sides: Compared | None
) -> dict[str, Any]:
    """hint, came, expected, and looked where the value is not a result of the exercise."""
    hint, _, rest = ("\n" + text).partition("\nassert ")
    first, test = rest.split("\n", 1)[0], statement.test
    subject: ast.expr = test
    came, expected = first, "a true value" if not isinstance(test, ast.Call) else "True"
    if isinstance(test, ast.Compare) and sides:
        subject = test.left
        came, expected = sides.left, sides.right
        expected = expected if sides.op in ("==", "is") else f"{sides.op} {expected}"
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        subject = test.operand
        came, expected = first.removeprefix("not "), "False"
    shown = {"hint": hint.strip(), "came": _shorten(came), "expected": expected}
    if _find_call(subject, name, frame) is None:
        shown["looked"] = subject.id if isinstance(subject, ast.Name) else _shown(subject, frame)
    return shown


def _of_raises(text: str) -> dict[str, Any]:
    """came and expected of `with pytest.raises(...)`."""
    if match := re.search(r"DID NOT RAISE (?:<class '(?:\w+\.)*(\w+)'>|(.+))", text):
        return {"came": "no exception", "expected": match[1] or match[2], "hint": ""}
    wanted = re.search(r"(?:regex|pattern): (.+)", text, re.IGNORECASE)
    actual = re.search(r"(?:message|input): (.+)", text, re.IGNORECASE)
    if wanted and actual:
        return {"came": actual[1], "expected": f"words like {wanted[1]}", "hint": ""}
    return {}


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


# -- frames and source --


def _last_frame(error: BaseException, place: str) -> tuple[FrameType, int] | None:
    """The innermost frame in a file or folder, and its line."""
    found, step = None, error.__traceback__
    while step is not None:
        if _is_in(step, place):
            found = step.tb_frame, step.tb_lineno
        step = step.tb_next
    return found


def _is_in(step: TracebackType, place: str) -> bool:
    file = step.tb_frame.f_code.co_filename
    return file == place or file.startswith((place + "/", place + "\\"))


def _place(found: tuple[FrameType, int]) -> list[str]:
    frame, line = found
    summary = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
    return [f"{Path(frame.f_code.co_filename).name}:{line}", summary.line or ""]


@lru_cache
def _nodes(path: Path) -> list[ast.stmt | ast.Call]:
    """The statements and calls of a file; kept, because a walk takes as long as many tests."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    return [node for node in nodes if isinstance(node, (ast.stmt, ast.Call))]


def _statement_at(path: Path, line: int) -> ast.stmt | None:
    """The innermost statement that covers a line."""
    hits = [
        node
        for node in _nodes(path)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(hits, key=lambda node: node.lineno, default=None)


def _called(
    statement: ast.stmt | None, path: Path, line: int, name: str, frame: FrameType
) -> str | None:
    """The call of the exercise in a statement, or else the last one above it in the test."""
    if statement is None:
        return None
    call = _find_call(statement, name, frame)
    if call is None:
        start = frame.f_code.co_firstlineno
        calls = [node for node in _nodes(path) if isinstance(node, ast.Call)]
        above = [node for node in calls if start <= node.lineno < line]
        found = [call for node in above if (call := _as_call(node, name, frame))]
        call = max(found, key=lambda node: node.lineno, default=None)
    return _shown(call, frame) if call else None


def _find_call(inside: ast.AST, name: str, frame: FrameType) -> ast.Call | None:
    calls = [node for node in ast.walk(inside) if isinstance(node, ast.Call)]
    return next((call for node in calls if (call := _as_call(node, name, frame))), None)


def _as_call(node: ast.Call, name: str, frame: FrameType) -> ast.Call | None:
    """The call, if it means the exercise; `error_of(pool.free, ids)` means `pool.free(ids)`."""
    if _means(node.func, name, frame):
        return node
    if node.args and _means(node.args[0], name, frame):
        called = ast.Call(node.args[0], node.args[1:], node.keywords)
        return ast.copy_location(called, node)
    return None


def _means(function: ast.expr, name: str, frame: FrameType) -> bool:
    """Whether an expression is the exercise: its last name, and its class where it is known."""
    *_, owner, last = name.split(".")
    if isinstance(function, ast.Name):
        return function.id == last
    if not isinstance(function, ast.Attribute) or function.attr != last:
        return False
    base = function.value
    known = isinstance(base, ast.Name) and base.id in frame.f_locals
    if not known or not owner[:1].isupper():
        return True
    assert isinstance(base, ast.Name)
    return owner in [cls.__name__ for cls in type(frame.f_locals[base.id]).__mro__]


def _shown(expression: ast.expr, frame: FrameType) -> str:
    """An expression as text, plain variables replaced by their values."""
    copy = ast.parse(ast.unparse(expression), mode="eval").body
    return _shorten(ast.unparse(_Values(frame).visit(copy)))


class _Values(ast.NodeTransformer):
    """Puts values in the place of names; names that are called or have attributes stay."""

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return node if isinstance(node.value, ast.Name) else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self.frame.f_locals.get(node.id, self)
        if isinstance(value, (list, tuple)):
            plain = all(isinstance(item, PLAIN) for item in value)
        else:
            plain = isinstance(value, PLAIN)
        return ast.Name(text_of(value)) if plain and len(text_of(value)) <= 40 else node
