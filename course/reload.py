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
    for module, before in old.items():
        _rebind(before, sys.modules[PREFIX + module], namespace)


def _imports(path: Path) -> set[str]:
    """Modules of the package that a module imports, at its top or inside a function."""
    try:
        return _imports_of(read(path).removeprefix("\ufeff"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return set()


@lru_cache(maxsize=200)  # parsing the whole package takes half a second
def _imports_of(text: str) -> set[str]:
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
    return out


def _rebind(old: ModuleType, new: ModuleType, namespace: dict[str, Any]) -> None:
    """Names of the notebook that meant something of the old module mean the new one's."""
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
            _move_objects(before, after)


def _move_objects(before: type, after: type) -> None:
    """Live objects get the new class, and the notebook's subclasses the new base."""
    for thing in gc.get_referrers(before):
        try:
            if type(thing) is before:
                object.__setattr__(thing, "__class__", after)  # also of frozen dataclasses
            elif _is_subclass_outside(thing, before):
                thing.__bases__ = tuple(after if b is before else b for b in thing.__bases__)
        except TypeError:
            pass  # another layout: the object stays what it was


def _is_subclass_outside(thing: Any, base: type) -> bool:
    """Whether `thing` is a class of the notebook made from `base`."""
    return (
        isinstance(thing, type)
        and base in thing.__bases__
        and not thing.__module__.startswith(PREFIX)
    )
