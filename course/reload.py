"""Run changed modules again in a running kernel, inside the objects that are already there.

Modules, classes and functions stay the objects that they are; running the new source changes what
is in them. Everything that holds a function (another module, a partial, a bound method, an engine
made before) therefore runs the newest code, and nothing has to be found and replaced. What this
cannot change, `living` tells the learner: values computed before, and recorded graphs.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from course.files import read, root

LAYOUT = (GetSetDescriptorType, MemberDescriptorType)  # of the class that made them


def stamps() -> dict[str, int]:
    """When each module of the package last changed: dotted name -> nanoseconds."""
    folder = root()
    return {
        module_name(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in (folder / "minivllm").rglob("*.py")
    }


def module_name(path: Path) -> str:
    """`minivllm/cpu/ops.py` -> minivllm.cpu.ops; `minivllm/cpu/__init__.py` -> minivllm.cpu."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def file_of(name: str) -> str:
    """`minivllm/cpu/ops.py` of the loaded module minivllm.cpu.ops."""
    return Path(str(sys.modules[name].__file__)).resolve().relative_to(root()).as_posix()


def import_again(changed: set[str], namespace: dict[str, Any]) -> list[str]:
    """Run the source of these modules again; constants of the notebook follow.

    Returns the names of classes that could not be changed in place: objects made of them before
    keep the old code. If a module's source cannot run, that module stays as it is, and the
    exception is raised.
    """
    importlib.invalidate_caches()
    left: list[str] = []
    # A module is usually there before those that it imports, which run first.
    loaded = [*sys.modules, *changed]
    pending = sorted(changed, key=loaded.index, reverse=True)
    for name in pending:  # grows
        module = sys.modules.get(name)
        if module is None:
            importlib.import_module(name)
            continue
        before = dict(vars(module))
        _run(module)
        replaced = {
            key
            for key, value in before.items()
            if not key.startswith("__")
            if vars(module).get(key) is not value or _is_kernel(value)
        }
        left += [
            f"{name}.{key}"
            for key in replaced
            if _module_of(before[key]) == name and isinstance(before[key], type)
        ]
        pending += [n for n in _importers(name, replaced) if n not in pending]
        # Names that are gone are none of the module's: Triton's interpreter puts its own into a
        # module, and into the notebook.
        for key in replaced & vars(module).keys():
            if key in namespace and namespace[key] is before[key]:
                namespace[key] = vars(module)[key]
    return left


def _run(module: ModuleType) -> None:
    """Run a module's source: once on the side, to see that it can, then in the module."""
    file = str(module.__file__)
    linecache.checkcache(file)  # Triton compiles what `inspect` finds there
    code = compile(read(Path(file)).removeprefix("\ufeff"), file, "exec", dont_inherit=True)
    exec(code, {name: vars(module)[name] for name in vars(module) if name.startswith("__")})
    names = _Names(module)
    exec(code, vars(module), names)
    for name in names.before.keys() - names.stored:
        if not name.startswith("__") and not isinstance(names.before[name], ModuleType):
            del vars(module)[name]


class _Names(dict[str, Any]):
    """Where a module that runs again stores its names: into the objects that have them."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.module = module
        self.before = dict(vars(module))
        self.stored: set[str] = set()

    def __setitem__(self, name: str, new: Any) -> None:
        self.stored.add(name)
        vars(self.module)[name] = _adopt(self.before.get(name), new, self.module.__name__)

    def __delitem__(self, name: str) -> None:
        del vars(self.module)[name]


def _adopt(old: Any, new: Any, module: str) -> Any:
    """Return the object to use for `new`: `old`, changed in place, if both are of the same kind."""
    if type(old) is type(new) and _are_equal(old, new):
        return old
    if not (_module_of(old) == _module_of(new) == module):
        return new  # imported, or not a definition
    if isinstance(old, FunctionType) and callable(new) and not isinstance(new, type):
        _adopt_function(old, new)
        return old
    if isinstance(old, (staticmethod, classmethod)) and type(old) is type(new):
        function = _adopt(old.__func__, new.__func__, module)
        return old if function is old.__func__ else new
    if isinstance(old, type) and isinstance(new, type) and _fits(old, new):
        _adopt_class(old, new)
        return old
    if _is_kernel(old) and type(old) is type(new):
        vars(old).clear()
        vars(old).update(vars(new))
        return old
    return new


def _are_equal(old: Any, new: Any) -> bool:
    with suppress(Exception):  # of tensors and arrays, the answer is another one
        return bool(old == new)
    return False


def _module_of(thing: Any) -> str | None:
    return _module_of(thing.fn) if _is_kernel(thing) else getattr(thing, "__module__", None)


def _is_kernel(thing: Any) -> bool:
    """Whether it is a Triton kernel. Its compiled code holds that of the kernels it calls."""
    return type(thing).__module__.startswith("triton.") and hasattr(thing, "fn")


# -- functions -----------------------------------------------------------------------------------


def _adopt_function(old: FunctionType, new: Any) -> None:
    """Have `old` do what `new` does."""
    if isinstance(new, FunctionType) and _can_take_code(old, new):
        old.__code__ = new.__code__
        for cell, fresh in zip(old.__closure__ or (), new.__closure__ or ()):
            cell.cell_contents = fresh.cell_contents
        for name in ("__defaults__", "__kwdefaults__", "__doc__", "__annotations__"):
            setattr(old, name, getattr(new, name))
        old.__dict__ = dict(vars(new))
        return
    # A decorator or `super()` came or went: `old` cannot take that code, but it can call it.
    old.__code__ = _call_newest.__code__.replace(co_freevars=old.__code__.co_freevars)
    old.__defaults__ = None
    old.__kwdefaults__ = {"_newest": new}
    old.__dict__ = {"__wrapped__": new}


def _can_take_code(old: FunctionType, new: FunctionType) -> bool:
    same_names = old.__code__.co_freevars == new.__code__.co_freevars
    return same_names and old.__globals__ is new.__globals__


def _call_newest(*arguments: Any, _newest: Any, **keywords: Any) -> Any:
    return _newest(*arguments, **keywords)


# -- classes -------------------------------------------------------------------------------------


def _fits(old: type, new: type) -> bool:
    """Whether objects of the class `old` can become those of `new`: same bases, same slots."""
    slots = [
        {name for name, value in vars(cls).items() if isinstance(value, LAYOUT)}
        for cls in (old, new)
    ]
    return type(old) is type(new) and old.__bases__ == new.__bases__ and slots[0] == slots[1]


def _adopt_class(old: type, new: type) -> None:
    """Give `old` the attributes of `new`, and take those that `new` lacks."""
    for value in vars(new).values():
        for function in _functions_in(value):
            _point_to(function, old, new)
    for name, value in dict(vars(new)).items():
        if isinstance(value, LAYOUT) or name == "_abc_impl":
            continue
        before = vars(old).get(name)
        adopted = _adopt(before, value, old.__module__)
        if adopted is not before:
            setattr(old, name, adopted)
    for name in vars(old).keys() - vars(new).keys():
        delattr(old, name)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions that an attribute of a class consists of: of a property, of a decorator."""
    if isinstance(value, FunctionType):
        yield value
    for name in ("fget", "fset", "fdel", "func", "__wrapped__"):
        if isinstance(inner := getattr(value, name, None), FunctionType):
            yield from _functions_in(inner)


def _point_to(function: FunctionType, old: type, new: type) -> None:
    """`super()`, and a frozen dataclass, know their class by a cell: it must be the class that is
    used."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            if cell.cell_contents is new:
                cell.cell_contents = old


# -- who imports what ----------------------------------------------------------------------------


def _importers(module: str, names: set[str]) -> list[str]:
    """Loaded modules of the package that import one of these names from `module`."""
    if not names:
        return []
    files = {
        name: str(loaded.__file__)
        for name, loaded in sys.modules.items()
        if name.startswith("minivllm.") and getattr(loaded, "__file__", None)
    }
    return [
        name
        for name, file in files.items()
        if any(
            resolve_name(source, sys.modules[name].__package__ or "") == module
            for source, imported in _imports_of(read(Path(file)))
            if imported in names
        )
    ]


@lru_cache(maxsize=200)  # most modules are the same at the next build
def _imports_of(text: str) -> list[tuple[str, str]]:
    """(module, name) of each `from module import name`, at the top or inside a function."""
    return [
        ("." * node.level + (node.module or ""), alias.name)
        for node in ast.walk(ast.parse(text.removeprefix("\ufeff")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
