"""The library of wrong answers.

`course/mistakes/NN_name.py` holds wrong versions of the exercises, each with the words that the
check must say to it:

    @mistake("block_manager.blocks_for", "do you round down?")
    def blocks_for(num_tokens, block_size):
        return num_tokens // block_size

The files are read, never imported.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from course import files, splice


@dataclass(frozen=True)
class Mistake:
    """One wrong answer."""

    name: str  # of the exercise
    says: str
    source: str


def read_mistakes(path: Path) -> list[Mistake]:
    """The wrong answers of a file in its order; none if the file does not exist."""
    if not path.exists():
        return []
    text = files.read(path).replace("\r\n", "\n")
    return [found for node in splice.parse(text).body if (found := _mistake(text, node))]


def _mistake(text: str, node: ast.stmt) -> Mistake | None:
    for decorator in getattr(node, "decorator_list", []):
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "mistake":
            name, says = (ast.literal_eval(argument) for argument in decorator.args)
            source = text.split("\n")[decorator.end_lineno : node.end_lineno]
            return Mistake(name, says, "\n".join(source))
    return None
