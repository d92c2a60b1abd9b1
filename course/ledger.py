"""The record of what the learner did: `.course/ledger.json` next to the package, ignored by git.

One entry an exercise, by its name:
    mine     digest of the code that the learner laid, "opened" (work in an editor), or None
    passed   digest of the code that passed its check
    history  earlier texts, the latest last, each {"text": ..., "mine": ...}
Digests, because a plain flag would be wrong after `git checkout`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from course import files

LOCK_LIMIT = 30  # seconds

Book = dict[str, dict[str, Any]]


def digest(text: str) -> str:
    """A short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def learner_code(book: Book) -> list[str]:
    """Names of the exercises that the learner wrote, as far as the ledger knows."""
    return [name for name, entry in book.items() if entry.get("mine")]


def entry_of(book: Book, name: str) -> dict[str, Any]:
    """The entry of an exercise, made if there is none."""
    return book.setdefault(name, {"mine": None, "passed": None, "history": []})


@contextmanager
def ledger() -> Iterator[Book]:
    """The ledger under a lock (two notebooks may write at once); changes are kept at the end.

    Raises CourseError where it cannot be written, or another one holds the lock for too long.
    """
    path = files.root() / ".course" / "ledger.json"
    try:
        path.parent.mkdir(exist_ok=True)
        with FileLock(path.parent / "lock", timeout=LOCK_LIMIT):
            book = _read(path)
            before = json.dumps(book)
            yield book
            if json.dumps(book) != before:
                files.write(path, json.dumps(book, indent=1))
    except Timeout:
        raise files.CourseError(
            f"Another notebook has been writing for {LOCK_LIMIT} s. "
            f"If none is open, delete {path.parent / 'lock'}."
        ) from None
    except PermissionError as error:
        raise files.not_writable(error, path.parent) from None


def _read(path: Path) -> Book:
    """The book; one that cannot be read is kept aside, said, and treated as empty."""
    if not path.exists():
        return {}
    try:
        book = json.loads(path.read_text("utf-8"))
        if isinstance(book, dict) and all(isinstance(entry, dict) for entry in book.values()):
            return book
    except ValueError:
        pass
    names = (path.with_name(f"{path.name}.broken-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    print(
        f"The ledger could not be read; it is kept as .course/{aside.name}, and a new one begins.\n"
        "Your code is untouched; run your checks again to have them counted."
    )
    return {}
