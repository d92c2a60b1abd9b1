"""Whether an answer can be called as the engine calls it: its first line against ours."""

from __future__ import annotations

import ast
import textwrap

from course import splice

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Decorators that change how a function is called. Others, such as `functools.cache`, are allowed.
BINDING = ("staticmethod", "classmethod", "property")


def signature_fault(source: str, reference: str) -> str | None:
    """How the definition in `source` differs from `reference` for its callers, with the first
    lines that it must have; None if it does not differ.

    Annotations and further parameters with a default are left to the learner.
    Example: `def f(n): ...` against `def f(num_tokens): ...` ->
    "its parameter 1 is `n`, and must be `num_tokens`. Its first lines must stay: ...".
    """
    mine = _function(source)
    ours = _function(reference)
    if mine is None or ours is None:
        return None  # a class, or a property with its setter
    fault = _kind_fault(mine, ours) or _parameter_fault(mine.args, ours.args)
    return f"{fault}.\nIts first lines must stay:\n{_first_lines(ours)}" if fault else None


def _first_lines(function: Function) -> str:
    """Decorators and signature, indented."""
    bare = type(function)(**{**dict(ast.iter_fields(function)), "body": [ast.Pass()]})
    text = ast.unparse(ast.fix_missing_locations(bare)).removesuffix("\n    pass").strip()
    return textwrap.indent(text, "    ")


def _function(source: str) -> Function | None:
    found = [node for node in splice.parse(source).body if isinstance(node, Function)]
    return found[0] if len(found) == 1 else None


def _kind_fault(mine: Function, ours: Function) -> str | None:
    if type(mine) is not type(ours):
        return "it must be a plain `def`, not `async def`"
    made = [ast.unparse(node) for node in mine.decorator_list]
    wanted = [ast.unparse(node) for node in ours.decorator_list]
    lost = [name for name in wanted if name not in made]
    if lost:
        return f"`@{lost[0]}` above it is missing"
    added = [name for name in made if name in BINDING and name not in wanted]
    return f"`@{added[0]}` above it must go" if added else None


def _parameter_fault(mine: ast.arguments, ours: ast.arguments) -> str | None:
    names = [arg.arg for arg in (*mine.posonlyargs, *mine.args)]
    wanted = [arg.arg for arg in (*ours.posonlyargs, *ours.args)]
    for place, name in enumerate(wanted):
        if place >= len(names):
            return f"its parameter `{name}` is missing"
        if names[place] != name:
            return f"its parameter {place + 1} is `{names[place]}`, and must be `{name}`"
    keywords = [arg.arg for arg in mine.kwonlyargs]
    for arg in ours.kwonlyargs:
        if arg.arg not in (*keywords, *names):
            return f"its parameter `{arg.arg}` is missing"
    defaults = _defaults(mine)
    for name, value in _defaults(ours).items():
        if defaults.get(name) != value:
            return f"its parameter `{name}` must have the default {value}"
    for name in (*names, *keywords):
        if name not in wanted and name not in _names(ours) and name not in defaults:
            return f"its parameter `{name}` is one too many: callers do not pass it"
    return None


def _names(arguments: ast.arguments) -> list[str]:
    return [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _defaults(arguments: ast.arguments) -> dict[str, str]:
    """The default of each parameter that has one, as text."""
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults))
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None]
    return {arg.arg: ast.unparse(value) for arg, value in pairs}
