"""What some chapters need and not every machine has: Triton, which there is for Linux alone.

Without it their cells and checks say so and fail nothing.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec

NEEDS_LINUX = (
    "needs Linux: Triton, which is not installed here, is made for no other system. On Windows"
    " take WSL 2 (`wsl --install`, then the commands of the README), on macOS a Linux container"
    " (`docker run -it -v .:/course -w /course python:3.12 bash`), on Linux `pip install triton`"
)
IMPORTS_TRITON = re.compile(r"^(import|from) triton\b", re.MULTILINE)


def lacking(text: str) -> str | None:
    """What code with this text needs and this machine lacks, with the remedy; or None."""
    return NEEDS_LINUX if IMPORTS_TRITON.search(text) and find_spec("triton") is None else None


class SkipCells:
    """Where Triton is missing: replaces cells that need it by a line that says so.

    A cell needs Triton if it imports it, or uses a name from a cell that was skipped. Put into
    IPython's `input_transformers_cleanup`; cells that begin with a magic are left alone.
    """

    def __init__(self) -> None:
        self.missing: set[str] = set()  # names that skipped cells would have defined

    def __call__(self, lines: list[str]) -> list[str]:
        text = "".join(lines)
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:  # a magic, or a mistake that Python explains better
            return lines
        bound = {name for node in nodes for name in _bound(node)}
        used = {node.id for node in nodes if isinstance(node, ast.Name)} - bound
        imports = IMPORTS_TRITON.search(text) is not None
        if not imports and not used & self.missing:
            self.missing -= bound
            return lines
        self.missing |= bound
        why = NEEDS_LINUX if imports else "needs Triton"
        return [f"print({f'Skipped: this cell {why}.'!r})\n"]


def _bound(node: ast.AST) -> list[str]:
    """The names that an assignment, an import or a definition binds."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    return []
