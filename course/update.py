"""A new version of the course under a learner's work.

The learner's functions are in tracked files, so `git pull` would refuse or merge them. They are
put aside in `.course/carry/` with the notebooks they worked in, the tree gets our text back, the
new version comes, and the functions are laid into it. A notebook they worked in comes back as
`NN_name.mine.ipynb` next to the new one: the new cells, with their answers and their own cells.
What cannot be laid stays in `.course/carry/`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sized
from pathlib import Path

from course import exercises as ex
from course import files, splice
from course.ledger import entry_of, learner_code, ledger
from course.notebooks import as_text, is_edited, merge, read_notebook, write_notebook


def update() -> Iterator[str]:
    """Fetch the new version with git; yields what happened, line by line.

    If it is stopped half way, the next call goes on: what was put aside is never overwritten.
    """
    carry = carry_folder()
    if not (carry / "functions.json").exists():
        yield put_aside(carry, files.root(), own_functions())
        known = ex.exercises()
        ex.lay({name: known[name].reference for name in ex.learner_exercises()}, mine=False)
        git("checkout", "--", "notebooks")
    failure = pull()
    if failure:
        yield failure
    yield from bring_notebooks(carry, keep_new=not failure)
    yield from lay_again(carry)


def update_from(old: Path) -> Iterator[str]:
    """Take over the work in another folder, which stays as it is."""
    if not (old / "minivllm").is_dir():
        raise files.CourseError(f"{old} holds no minivllm/. Name the folder of your old version.")
    yield put_aside(carry_folder(), old, functions_in(old))
    yield from bring_notebooks(carry_folder(), keep_new=True)
    yield from lay_again(carry_folder())


def carry_folder() -> Path:
    """Where work waits for its new place."""
    return files.root() / ".course" / "carry"


# -- from the old version ----------------------------------------------------------------------


def own_functions() -> dict[str, str]:
    """What the learner wrote in this tree, also in an editor without telling the ledger."""
    return {n: ex.current(n) for n, word in ex.states().items() if word in ex.MINE}


def functions_in(old: Path) -> dict[str, str]:
    """What the learner wrote in another tree, as its ledger has it."""
    book = old / ".course" / "ledger.json"
    names = learner_code(json.loads(book.read_text("utf-8"))) if book.exists() else []
    functions = {}
    for name in names:
        module, _, inner = name.partition(".")
        path = old / "minivllm" / f"{module}.py"
        if not path.exists():
            continue  # of an earlier version, whose module has moved since
        source = splice.take_all(files.read(path), inner)
        if source and not splice.is_hole(splice.find(source, inner.rsplit(".", 1)[-1])[-1].node):
            functions[name] = source
    return functions


def put_aside(carry: Path, tree: Path, functions: dict[str, str]) -> str:
    """Copy the learner's functions and the notebooks they changed in `tree` into `carry`."""
    (carry / "notebooks").mkdir(parents=True, exist_ok=True)
    edited = edited_notebooks(tree)
    for path in edited:
        shutil.copy2(path, carry / "notebooks")
    # Last and at once: from here on the next call goes on instead of beginning anew.
    files.write(carry / "functions.json", json.dumps(functions, indent=1))
    return f"Put aside: {count(functions, 'function')}, {count(edited, 'notebook')}."


def edited_notebooks(tree: Path) -> list[Path]:
    """Notebooks with cells that the learner changed, without those that an update kept before."""
    paths = sorted((tree / "notebooks").glob("*.ipynb"))
    current = [path for path in paths if not path.name.endswith(".mine.ipynb")]
    return [path for path in current if is_edited(read_notebook(path))]


# -- the new version ---------------------------------------------------------------------------


def pull() -> str | None:
    """`git pull`; what to do if it did not work, else None."""
    result = git("pull", "--ff-only")
    if result.returncode == 0:
        return None
    return (
        f"git pull did not work, so your code is put back as it was:\n{result.stderr.strip()}\n"
        "If git names files that you changed outside the exercises, commit or stash them and run\n"
        "this again. Without git: unpack the new version into a folder of its own and run there\n"
        f"python -m course update --from {files.root()}"
    )


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in the tree; without git it counts as failed."""
    command = ["git", "-C", str(files.root()), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 1, "", "git is not installed")


def bring_notebooks(carry: Path, keep_new: bool) -> Iterator[str]:
    """Put the learner's notebooks back: next to the new ones, or where they were."""
    for path in sorted((carry / "notebooks").glob("*.ipynb")):
        target = new = files.root() / "notebooks" / path.name
        if keep_new:
            target = free_name(new.with_suffix(""))
            if new.exists():
                merged = merge(read_notebook(path), read_notebook(new))
                write_notebook(path, as_text(merged))
            yield f"Your notebook is notebooks/{target.name}, next to the new {path.name}."
        shutil.move(path, target)


def free_name(stem: Path) -> Path:
    """03.mine.ipynb, or 03-2.mine.ipynb where that exists, and so on."""
    numbered = (stem.with_name(f"{stem.name}-{n}.mine.ipynb") for n in range(2, 1000))
    first = stem.with_name(f"{stem.name}.mine.ipynb")
    return next(path for path in [first, *numbered] if not path.exists())


def lay_again(carry: Path) -> Iterator[str]:
    """Lay the functions put aside into the package, one by one; a failing one stays aside."""
    functions: dict[str, str] = json.loads((carry / "functions.json").read_text("utf-8"))
    refused = {name: reason for name, text in functions.items() if (reason := lay_one(name, text))}
    for name, reason in refused.items():
        (carry / f"{name}.py").write_text(functions[name], "utf-8")
        yield f"Kept as .course/carry/{name}.py, not laid: {reason}"
    (carry / "functions.json").unlink()
    if laid := [name for name in functions if name not in refused]:
        yield f"Your code runs in this version: {', '.join(laid)}."
        yield "The tests may be new, so check it again: python -m course check"


def lay_one(name: str, source: str) -> str | None:
    """Lay one function; the reason if it cannot be."""
    if name not in ex.exercises():
        return "this version has no such exercise"
    try:
        ex.lay({name: source}, mine=True)
    except files.CourseError as error:
        return str(error)
    with ledger() as book:
        entry_of(book, name)["passed"] = None
    return None


def count(things: Sized, noun: str) -> str:
    """Such as "2 functions"."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
