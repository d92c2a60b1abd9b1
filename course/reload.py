"""Import changed modules afresh in a running kernel, and move what is live to the new code.

Imported again are the changed modules and those that import them, never all: layer 0 keeps its
identity, and a loaded model stays. What cannot be moved: functions stored in a container, bound
methods, partials, recorded graphs.
"""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from course.files import read, root

PREFIX = "minivllm."


def stamps() -> dict[Path, int]:
    """The time of the last change of every module of the package, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in (root() / "minivllm").glob("*.py")}


def dependents(changed: set[str]) -> set[str]:
    """The changed modules and every module that imports one of them, however far."""
    imports = {path.stem: _imports(path) for path in (root() / "minivllm").glob("*.py")}
    out = set(changed)
    while more := {module for module, wanted in imports.items() if wanted & out} - out:
        out |= more
    return out - {"__init__"}


def import_again(changed: set[str], namespace: dict[str, Any]) -> None:
    """Import the changed modules and their dependents afresh; rebind the notebook's names.

    If an import fails, everything is as it was, and the exception goes on.
    """
    importlib.invalidate_caches()
    loaded = {name.removeprefix(PREFIX) for name in sys.modules if name.startswith(PREFIX)}
    stale = sorted(dependents(changed) & loaded)
    old = {module: sys.modules.pop(PREFIX + module) for module in stale}
    try:
        for module in sorted({*old, *(changed - {"__init__"})}):
            importlib.import_module(PREFIX + module)
    except BaseException:
        for module, before in old.items():
            sys.modules[PREFIX + module] = before
            setattr(sys.modules["minivllm"], module, before)
        raise
    classes: list[tuple[type, type]] = []
    for module, before in old.items():
        classes += _rebind(before, sys.modules[PREFIX + module], namespace)
    _move_objects(classes)


def _imports(path: Path) -> frozenset[str]:
    """Modules of the package that a module imports, at its top or inside a function."""
    try:
        return _imports_of(read(path).removeprefix("\ufeff"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return frozenset()


@lru_cache(maxsize=200)  # most modules are the same at the next build
def _imports_of(text: str) -> frozenset[str]:
    tree = ast.parse(text)
    out: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            out |= {name.split(".")[1] for name in names if name.startswith(PREFIX)}
        elif isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").split(".")[0] == "minivllm"
        ):
            module = (node.module or "").removeprefix("minivllm").strip(".").split(".")[0]
            out |= {module} if module else {alias.name for alias in node.names}
    return frozenset(out)


def _rebind(
    old: ModuleType, new: ModuleType, namespace: dict[str, Any]
) -> Iterator[tuple[type, type]]:
    """Names of the notebook that meant something of the old module mean the new one's.

    Gives the classes of the old module, each with the new one.
    """
    for name in [key for key, value in namespace.items() if value is old]:
        namespace[name] = new
    for key, before in vars(old).items():
        if key.startswith("__") or key not in vars(new):
            continue
        after = vars(new)[key]
        if getattr(before, "__module__", None) != old.__name__:
            # A constant: equal ones may be the same object, so only under its own name.
            if key in namespace and namespace[key] is before:
                namespace[key] = after
            continue
        for name in [k for k, value in namespace.items() if value is before]:
            namespace[name] = after
        if isinstance(before, type) and isinstance(after, type):
            yield before, after


def _move_objects(classes: list[tuple[type, type]]) -> None:
    """Live objects get the new class, and the notebook's subclasses the new base."""
    news = {id(before): after for before, after in classes}
    olds = tuple(before for before, _ in classes)
    # One look at all objects of the process for all classes: it takes 50 ms.
    for thing in gc.get_referrers(*olds) if olds else ():
        try:
            if id(type(thing)) in news:
                object.__setattr__(thing, "__class__", news[id(type(thing))])  # also of frozen ones
            elif _is_subclass_outside(thing, olds):
                thing.__bases__ = tuple(news.get(id(base), base) for base in thing.__bases__)
        except TypeError:
            pass  # another layout: the object stays what it was


def _is_subclass_outside(thing: Any, bases: tuple[type, ...]) -> bool:
    """Whether `thing` is a class of the notebook made from one of `bases`."""
    return (
        isinstance(thing, type)
        and any(base in bases for base in thing.__bases__)
        and not thing.__module__.startswith(PREFIX)
    )
