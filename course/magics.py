"""`%%build`, `%check`, `%restore`, `%undo`, `%progress`: what a learner types in a notebook.

A failure is shown and the notebook goes on, so that "Run All" reaches the end; under pytest
(`MINIVLLM_COURSE_STRICT=1`) it is raised.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from course import living, reload, splice, verdict
from course.exercises import (
    current,
    definition,
    exercises,
    find_exercise,
    lay,
    learner_exercises,
    module_text,
    state,
    states,
    step_back,
)
from course.files import BuildError, CourseError, module_path
from course.ledger import ledger
from course.needs import lacking
from course.progress import progress_map
from course.signatures import signature_fault

GREEN, RED, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"


def shown(magic: Callable[..., None]) -> Callable[..., None]:
    """Print our errors instead of raising them, unless pytest runs the notebook."""

    @functools.wraps(magic)
    def run(course: Course, *arguments: Any) -> None:
        try:
            magic(course, *arguments)
        except CourseError as error:
            if os.environ.get("MINIVLLM_COURSE_STRICT") == "1":
                raise
            course.say(str(error))

    return run


@magics_class
class Course(Magics):
    """The magics of one kernel."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.stamps = reload.stamps()

    def import_changes(self, info: Any = None) -> None:
        """Before each cell: import again what an editor or another notebook has changed."""
        try:
            now = reload.stamps()
        except (OSError, CourseError):
            return  # the package is being moved about: the cell itself will say so
        changed = {name for name in now if now[name] != self.stamps.get(name)}
        self.stamps = now
        changed &= sys.modules.keys()
        if not changed:
            return
        names = ", ".join(name.removeprefix("minivllm.") for name in sorted(changed))
        try:
            self._run_again(changed)
            print(f"Imported again, changed on disk: {names}.")
            self._say_who_is_behind(
                [name for name in exercises() if f"minivllm.{name.split('.', 1)[0]}" in changed]
            )
        except BaseException as error:
            files = " ".join(sorted(reload.file_of(name) for name in changed))
            print(
                f"Changed on disk, and cannot be imported: {names} ({_words(error)}).\n"
                f"The old code runs on. Repair the file, or take it back: git checkout {files}"
            )

    @cell_magic
    @shown
    def build(self, line: str, cell: str) -> None:
        """%%build NAME...: write the definitions of this cell into the package, and import it."""
        names = _names(line, "%%build")
        if missing := lacking("".join(module_text(name) for name in names)):
            print(f"Not built: this chapter {missing}.")
            return
        finished, holes = parse_cell(names, cell)
        for name, source in finished.items():
            _refuse_other_signature(name, source)
        if finished:
            self._write(finished)
        for name in finished:
            self._take_over(name)
            print(f"Built {name}: the engine now runs your version.\nNext: %check {name}")
            for missing in undefined_names(name):
                print(
                    f"  Note: `{missing}` is not defined in {module_path(name).name}; "
                    "define or import it inside the function."
                )
        self._say_who_is_behind(finished)
        for name, what in holes.items():
            print(
                f"Open: {what}.\nReplace the `...` and run this cell again; "
                f"until then {_whose(name)} runs."
            )

    @line_magic
    @shown
    def check(self, line: str) -> None:
        """%check NAME...: run its tests on the code in the package."""
        for name in _names(line, "%check"):
            self._say_if_not_built(name)
            self.say(verdict.check(name))

    @line_magic
    @shown
    def restore(self, line: str) -> None:
        """%restore NAME... or %restore --all: our version back into the package."""
        if line.strip() == "--all":
            names = learner_exercises()
            if not names:
                print("Nothing to restore: every exercise is ours.")
        else:
            names = _names(line, "%restore")
        known = exercises()
        if names:
            self._write({name: known[name].reference for name in names}, mine=False)
        for name in names:
            print(f"Restored {name}: the engine runs our version. %undo {name} brings yours back.")
        self._say_who_is_behind(names)

    @line_magic
    @shown
    def undo(self, line: str) -> None:
        """%undo NAME: the version before the last change."""
        for name in _names(line, "%undo"):
            before = current(name)
            left = step_back(name)
            if left is None:
                raise CourseError(f"Nothing to undo: {name} has no earlier version.")
            self._import({name})
            is_back = "is back" if current(name) != before else "was there already"
            print(f"{name}: {_whose(name)} {is_back} ({left} more to undo).")
            self._say_who_is_behind([name])

    @line_magic
    @shown
    def progress(self, line: str) -> None:
        """%progress: which exercises are yours."""
        print(progress_map(states()))

    def say(self, text: str) -> None:
        """Print a text; in a notebook, lines with a mark are green or red."""
        if hasattr(self.shell, "kernel"):
            text = re.sub("^✓.*", rf"{GREEN}\g<0>{PLAIN}", text, flags=re.MULTILINE)
            text = re.sub("^✗.*", rf"{RED}\g<0>{PLAIN}", text, flags=re.MULTILINE)
        print(text)

    def _write(self, sources: dict[str, str], mine: bool = True) -> None:
        """Lay definitions and import them; what cannot be imported is removed again."""
        changed = lay(sources, mine)
        try:
            self._import(sources)
        except BaseException as error:
            for name in changed:
                step_back(name)
            self._import(sources)  # of several modules, some may have run the new text already
            raise BuildError(
                f"Not written: the module cannot be imported with it: {_words(error)}"
            ) from None

    def _take_over(self, name: str) -> None:
        """Rebind a name that the notebook defined itself to the package's function."""
        module, *inner = name.split(".")
        own = self.shell.user_ns.get(inner[0])
        if len(inner) == 1 and getattr(own, "__module__", None) == "__main__":
            self.shell.user_ns[inner[0]] = getattr(sys.modules[f"minivllm.{module}"], inner[0])
            print(f"  Note: `{inner[0]}` was this notebook's own; now it is the one built here.")

    def _say_if_not_built(self, name: str) -> None:
        """A cell without %%build defines a function for the notebook alone, which no check sees."""
        last = name.rsplit(".", 1)[-1]
        own = getattr(self.shell.user_ns.get(last), "__code__", None)
        if own is None or getattr(self.shell.user_ns[last], "__module__", "") != "__main__":
            return
        if splice.code_of(_source_of_cell(own)) != splice.code_of(current(name)):
            print(
                f"  Note: a cell without %%build defines another `{last}`. What is checked is the"
                f" version in the package: put %%build {name} above yours and run that cell."
            )

    def _import(self, names: Collection[str]) -> None:
        self._run_again({"minivllm." + name.split(".", 1)[0] for name in names})
        self.stamps = reload.stamps()

    def _run_again(self, modules: set[str]) -> None:
        for name in reload.import_again(modules, self.shell.user_ns):
            print(f"  Note: {name} has another layout now: objects made of it before keep the old.")

    def _say_who_is_behind(self, names: Collection[str]) -> None:
        for note in living.notes(names, self.shell.user_ns):
            print(f"  Note: {note}")


def parse_cell(names: list[str], cell: str) -> tuple[dict[str, str], dict[str, str]]:
    """What a build cell holds: name -> source of the finished, name -> what is open of the others.

    Raises BuildError with the line for everything that must not be written.
    """
    cell = cell.replace("\r\n", "\n")
    _refuse_syntax_errors(cell)
    finished: dict[str, str] = {}
    holes: dict[str, str] = {}
    used: set[int] = set()
    for name in names:
        last = name.rsplit(".", 1)[-1]
        source = definition(cell, name)
        if source is None:
            raise BuildError(f"Not written: this cell builds {name}, but has no `{last}` in it.")
        spans = splice.find(cell, name.split(".", 1)[1]) or splice.find(cell, last)
        used |= {row for span in spans for row in range(span.start, span.end)}
        _refuse_twice(name, spans)
        node = spans[-1].node
        if not splice.is_hole(node):
            finished[name] = source
        elif isinstance(node, ast.ClassDef):
            holes[name] = ", ".join(f"{name}.{method}" for method in splice.open_methods(node))
        else:
            holes[name] = name
    _refuse_extra_lines(names, cell, used)
    return finished, holes


def _refuse_syntax_errors(cell: str) -> None:
    try:
        compile(cell, "<build cell>", "exec", dont_inherit=True)
    except SyntaxError as error:
        lines, row = cell.split("\n"), error.lineno or 1
        text = lines[row - 1] if row <= len(lines) else ""
        raise BuildError(
            # Line 1 is the one with %%build.
            f"Not written: {type(error).__name__} in line {row + 1}: {error.msg}\n"
            f"    {text}\n    {' ' * ((error.offset or 1) - 1)}^"
        ) from None
    except ValueError as error:  # a null byte
        raise BuildError(f"Not written: {error}") from None


def _refuse_twice(name: str, spans: list[splice.Span]) -> None:
    """One name, two definitions: right only for a property with its setter, and overloads."""
    plain = [span for span in spans if not getattr(span.node, "decorator_list", [])]
    if len(plain) > 1:
        rows = " and ".join(str(span.node.lineno + 1) for span in plain)
        raise BuildError(
            f"Not written: this cell defines {name} in lines {rows}. Keep one of them."
        )


def _refuse_other_signature(name: str, source: str) -> None:
    if fault := signature_fault(source, exercises()[name].reference):
        short = name.rsplit(".", 1)[-1]
        raise BuildError(f"Not written: the engine could not call this {short}: {fault}")


def _refuse_extra_lines(names: list[str], cell: str, used: set[int]) -> None:
    classes = {part for name in names for part in name.split(".")[1:-1]}
    for node in ast.parse(cell).body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or node.lineno - 1 in used or set(splice.names_of(node)) & classes:
            continue
        line = cell.split("\n")[node.lineno - 1].strip()
        raise BuildError(
            f"Not written: line {node.lineno + 1} (`{line}`) is not part of {', '.join(names)}.\n"
            "A build cell holds only what it names: imports and helpers go inside the function, "
            "experiments into a new cell below."
        )


def undefined_names(name: str) -> list[str]:
    """Names that a freshly imported definition uses and its module does not have."""
    module = sys.modules["minivllm." + name.split(".", 1)[0]]
    target: Any = module
    for part in name.split(".")[1:]:
        target = vars(target).get(part)
    for wrapper in ("fget", "__func__", "fn", "__wrapped__"):
        target = getattr(target, wrapper, None) or target
    codes: list[CodeType] = [c for c in [getattr(target, "__code__", None)] if c]
    missing: set[str] = set()
    for code in codes:  # grows: functions inside functions
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        used = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
        missing |= {n for n in used if not hasattr(module, n) and not hasattr(builtins, n)}
    return sorted(missing)


def _names(line: str, magic: str) -> list[str]:
    """Full names of the exercises that a magic is given."""
    if not line.split():
        raise CourseError(f"{magic} which exercise? {magic} NAME; %progress lists them.")
    return [find_exercise(name).name for name in line.split()]


def _whose(name: str) -> str:
    """Which version of an exercise the engine runs."""
    with ledger() as book:
        word = state(exercises()[name], book)
    return {"borrowed": "our version", "open": "a hole"}.get(word, "your earlier version")


def _source_of_cell(code: CodeType) -> str:
    """The definition that a cell made; "" if its text is gone."""
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        return ""


def _words(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
