"""Find, remove, blank and replace definitions in the text of a module. Pure functions of text.

Works on line numbers from `ast`, so that all else stays byte for byte as it was. Lines are split
at "\\n" only: `str.splitlines` also splits at form feeds, which `ast` does not count.
"""

from __future__ import annotations

import ast
import io
import threading
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BLOCKS = (ast.If, ast.Try, ast.With)  # `if have_triton:` does not open a new name
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Span:
    """Lines [start, end) of one definition, its decorators and trailing comments included."""

    start: int
    end: int
    column: int
    node: ast.stmt


@lru_cache(maxsize=200)  # every exercise, and the modules that hold them
def parse(text: str) -> ast.Module:
    """`ast.parse`, also of a text that begins with a byte order mark. Do not change the result."""
    # Two threads that parse at once can fail in Python 3.11: "AST constructor recursion depth".
    with _ONE_AT_A_TIME:
        return ast.parse(text.removeprefix("\ufeff"))


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, _Definition):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def find(text: str, name: str) -> list[Span]:
    """All definitions of a dotted name: one, or several for overloads and property setters."""
    body, lines = parse(text).body, text.split("\n")
    *outer, last = name.split(".")
    for part in outer:
        inside = [
            n for n in _statements(body) if part in names_of(n) and isinstance(n, _Definition)
        ]
        if not inside:
            return []
        body = inside[-1].body
    return [_span(node, lines) for node in _statements(body) if last in names_of(node)]


def take(text: str, span: Span) -> str:
    """The source of a definition, moved to column 0, lines ending in \\n."""
    lines, fixed = text.split("\n"), _lines_inside_strings(span.node)
    out = []
    for index in range(span.start, span.end):
        line = lines[index].removesuffix("\r")
        movable = index not in fixed and not line[: span.column].strip()
        out.append(line[span.column :] if movable else line)
    return "\n".join(out)


def take_all(text: str, name: str) -> str | None:
    """The source of every definition of `name`, one below the other; None if there is none."""
    spans = find(text, name)
    return "\n".join(take(text, span) for span in spans) if spans else None


@lru_cache(maxsize=500)
def code_of(source: str) -> str:
    """What a definition does, in one form: formatters, comments and its docstring change nothing.

    The text itself where it does not compile.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, _Definition) and _docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def put(text: str, name: str, source: str) -> str:
    """`text` with the definitions of `name` replaced by those in `source`; all else untouched.

    Raises ValueError if their number differs, SyntaxError if the result does not compile.
    """
    old, new = find(text, name), find(source, name.rsplit(".", 1)[-1])
    if not old or len(old) != len(new):
        raise ValueError(f"{name} is defined {len(old)} times in the module, {len(new)} times here")
    lines, source_lines = text.split("\n"), source.split("\n")
    end = "\r" if lines[0].endswith("\r") else ""
    fixed = _lines_inside_strings(parse(source))
    for span, part in reversed(list(zip(old, new))):
        pad = lines[span.start][: span.column]
        lines[span.start : span.end] = [
            (line if index in fixed or not line.strip() else pad + line) + end
            for index, line in enumerate(source_lines[part.start : part.end], part.start)
        ]
    result = "\n".join(lines)
    parse(result)
    return result


def is_hole(node: ast.stmt) -> bool:
    """Whether the body holds nothing but a docstring, `...`, `pass` or NotImplementedError.

    A class is a hole if one of its methods is.
    """
    if isinstance(node, ast.ClassDef):
        return bool(open_methods(node))
    if isinstance(node, _Function):
        return all(_is_filler(statement) for statement in node.body)
    value = getattr(node, "value", None)
    return isinstance(value, ast.Constant) and value.value is ...


def open_methods(node: ast.ClassDef) -> list[str]:
    """Names of the methods of a class that are holes."""
    return [n.name for n in node.body if isinstance(n, _Function) and is_hole(n)]


def ends_in_raise(node: ast.stmt) -> bool:
    """Whether a finished body still ends in `raise NotImplementedError`."""
    return isinstance(node, _Function) and not is_hole(node) and _is_not_implemented(node.body[-1])


def blank(source: str, hole: str = "...") -> str:
    """A definition with its signature and docstring kept and its body replaced by `hole`."""
    tree, lines = parse(source), source.split("\n")
    functions = [n for n in _outermost_functions(tree.body) if not _is_overload(n)]
    for node in reversed(functions):
        row, column = _colon(lines, node)
        end = _span(node, lines).end
        one_line = node.body[0].lineno - 1 == row
        head = lines[row][: column + 1] if one_line else lines[row]
        kept = row
        if _docstring(node) is not None:
            kept = (node.body[0].end_lineno or 0) - 1
        body = [*lines[row + 1 : kept + 1], " " * (node.col_offset + 4) + hole]
        lines[row:end] = [head, *body]
    return "\n".join(lines)


# -- inside --


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block, looking into if / try / with."""
    for node in body:
        yield node
        if isinstance(node, _BLOCKS):
            yield from _statements(node.body + getattr(node, "orelse", []))


def _outermost_functions(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods in order of lines; those inside a function vanish with its body."""
    out: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for node in _statements(body):
        if isinstance(node, _Function):
            out.append(node)
        elif isinstance(node, ast.ClassDef):
            out += _outermost_functions(node.body)
    return out


def _span(node: ast.stmt, lines: list[str]) -> Span:
    """The span of a definition; comments below its last statement belong to the body."""
    decorators = getattr(node, "decorator_list", [])
    start = min([node.lineno] + [d.lineno for d in decorators]) - 1
    end = node.end_lineno or node.lineno
    if isinstance(node, _Definition):
        for index in range(end, len(lines)):
            line = lines[index].strip()
            deeper = len(lines[index]) - len(lines[index].lstrip()) > node.col_offset
            if line and not (line.startswith("#") and deeper):
                break
            end = index + 1 if line else end
    return Span(start, end, node.col_offset, node)


def _docstring(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, _Definition) or not isinstance(node.body[0], ast.Expr):
        return None
    value = node.body[0].value
    return value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _lines_inside_strings(tree: ast.AST) -> set[int]:
    """Indexes of lines that begin inside a string: to move them would change the string.

    Docstrings are moved: their indentation has no meaning.
    """
    docs = {id(_docstring(node)) for node in ast.walk(tree)}
    return {
        index
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in docs
        if isinstance(node, ast.JoinedStr) or isinstance(node.value, (str, bytes))
        for index in range(node.lineno, node.end_lineno or node.lineno)
    }


def _is_filler(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass) or _is_not_implemented(node)


def _is_not_implemented(node: ast.stmt) -> bool:
    return isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node)


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("overload" in ast.dump(decorator) for decorator in node.decorator_list)


def _colon(lines: list[str], node: ast.stmt) -> tuple[int, int]:
    """Line index and column of the colon that ends the signature."""
    depth, first = 0, node.lineno - 1
    text = "\n".join(lines[first:])[node.col_offset :]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.OP:
            continue
        depth += (token.string in "([{") - (token.string in ")]}")
        if token.string == ":" and depth == 0:
            shift = node.col_offset if token.start[0] == 1 else 0
            return first + token.start[0] - 1, token.start[1] + shift
    raise AssertionError("a def without a colon")
