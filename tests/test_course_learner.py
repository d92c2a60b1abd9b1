"""A learner's path through chapter 03, walked for real in a checkout of its own.

The real model is left out (nothing is fetched; the chapter then says so and goes on): the
solution notebook runs it, and `minivllm generate` runs here on a checkpoint of a few kilobytes.
"""

import re
import shutil
import subprocess
import sys

import pytest
from checkout import environment, make_checkout
from tiny_checkpoint import make_checkpoint
from toy_course import git

from course import exercises as ex
from course import sandbox
from course.authoring.mistakes import read_mistakes
from course.notebooks import as_text, read_notebook, write_notebook

pytestmark = pytest.mark.course

CHAPTER = "03_block_manager"
NOTEBOOK = f"notebooks/{CHAPTER}.ipynb"
MODULE = "minivllm/block_manager.py"

# Right, and nowhere our text: other operations, other loops, a helper inside.
ANSWERS = {
    "block_manager.blocks_for": '''\
def blocks_for(num_tokens: int, block_size: int) -> int:
    """Mine."""
    full, rest = divmod(num_tokens, block_size)
    return full + (1 if rest else 0)''',
    "block_manager.BlockPool.allocate": '''\
def allocate(self, num_blocks: int) -> list[int]:
    """Mine."""
    def take_one() -> int:
        block_id = next(iter(self.free_ids))
        del self.free_ids[block_id]
        self.prefixes.forget(block_id)
        self.ref_counts[block_id] += 1
        return block_id

    if len(self.free_ids) < num_blocks:
        raise ValueError(f"{num_blocks} are more than {len(self.free_ids)}")
    return [take_one() for _ in range(num_blocks)]''',
    "block_manager.BlockPool.share": '''\
def share(self, block_ids: Iterable[int]) -> None:
    """Mine."""
    for block_id in block_ids:
        self.ref_counts[block_id] += 1
        self.free_ids.pop(block_id, None)''',
    "block_manager.BlockPool.free": '''\
def free(self, block_ids: Iterable[int]) -> None:
    """Mine."""
    for block_id in block_ids:
        left = self.ref_counts[block_id] - 1
        self.ref_counts[block_id] = left
        if left:
            continue
        self.free_ids[block_id] = None
        if not self.prefixes.holds(block_id):
            self.free_ids.move_to_end(block_id, last=False)''',
    "block_manager.BlockManager.can_allocate": '''\
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    """Mine."""
    if num_blocks < 1:
        return True
    left = self.pool.num_free - num_blocks
    return left >= self.num_watermark_blocks if keep_watermark else left >= 0''',
    "block_manager.BlockManager.allocate": '''\
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    """Mine."""
    wanted = blocks_for(num_tokens, self.block_size)
    more = max(0, wanted - len(request.block_table))
    if not self.can_allocate(more, keep_watermark):
        return False
    request.block_table.extend(self.pool.allocate(more))
    return True''',
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files that git would commit, in a repository of their own; tests take a copy."""
    return make_checkout(tmp_path_factory.mktemp("clone") / "minivllm")


@pytest.fixture
def tree(clone, tmp_path):
    return shutil.copytree(clone, tmp_path / "minivllm")


def run(folder, *command: str, code: int = 0, **more: str) -> str:
    """Run `python COMMAND...` in the checkout."""
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(folder, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def run_all(folder, monkeypatch, only: tuple[str, ...] = ()) -> dict[str, str]:
    """ "Run All" in Jupyter, saved; cell id -> what it prints. `only`: just these and the first."""
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    nb = read_notebook(folder / NOTEBOOK)
    if only:
        setup = next(cell for cell in nb.cells if cell.cell_type == "code")
        nb.cells = [cell for cell in nb.cells if cell is setup or cell.id in only]
    sandbox.run_notebook(nb, folder, folder / "notebooks", strict=False)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    printed = {cell.id: "".join(o.get("text", "") for o in cell.outputs) for cell in code}
    return {name: re.sub(r"\x1b\[\d+m", "", text) for name, text in printed.items()}


def write_answers(folder, answers: dict[str, str]) -> None:
    """Type answers into the build cells of the notebook."""
    nb = read_notebook(folder / NOTEBOOK)
    for cell in nb.cells:
        names = cell.metadata.get("course", {}).get("build", [])
        if names and names[0] in answers:
            cell.source = "\n\n\n".join([cell.source.split("\n")[0], answers[names[0]]])
    write_notebook(folder / NOTEBOOK, as_text(nb))


def lay(folder, name: str, source: str) -> None:
    """What running a build cell does."""
    script = f"from course.exercises import lay; lay({{{name!r}: {source!r}}}, mine=True)"
    run(folder, "-c", script)


def cell_of(kind: str, name: str) -> str:
    """The id of a build or check cell."""
    return f"{kind}-{name}".replace(".", "-")


def text_with_ours(folder) -> str:
    """The learner's module with our text in the place of the exercises, and of nothing else."""
    ours = {e.name: e.reference for e in ex.exercises().values() if e.notebook == CHAPTER}
    return ex.spliced(folder, ours)[folder / MODULE]


def test_the_answers_below_are_those_of_the_chapter():
    """Else this file would walk another path than the reader."""
    assert list(ANSWERS) == [e.name for e in ex.exercises().values() if e.notebook == CHAPTER]


def test_in_the_blank_notebook_every_check_says_open_and_run_all_goes_on(tree, monkeypatch):
    """And nothing is written by it. Build and check cells: gate 3 runs the experiments as well."""
    cells = [cell_of(kind, name) for name in ANSWERS for kind in ("build", "check")]
    printed = run_all(tree, monkeypatch, tuple(cells))
    checks = {key: text for key, text in printed.items() if key.startswith("check-")}
    assert len(checks) == len(ANSWERS)
    assert all(text.startswith("Open: ") for text in checks.values())
    assert git(tree, "status", "--porcelain") == ""


def test_a_wrong_answer_is_named_and_the_right_one_passes(tree, monkeypatch):
    """In the cells of one exercise; after the right one nothing else in the file has changed."""
    name = "block_manager.blocks_for"
    cells = (cell_of("build", name), cell_of("check", name))
    library = read_mistakes(tree / f"course/mistakes/{CHAPTER}.py")
    mistake = next(mistake for mistake in library if mistake.name == name)
    write_answers(tree, {name: mistake.source.strip()})
    text = run_all(tree, monkeypatch, cells)[cells[1]]
    assert text.startswith("✗ blocks_for") and mistake.says in text
    write_answers(tree, {name: ANSWERS[name]})
    text = run_all(tree, monkeypatch, cells)[cells[1]]
    assert text.startswith("✓ blocks_for") and f"1 of {len(ANSWERS)} yours" in text
    assert '+    """Mine.' in git(tree, "diff", MODULE)
    assert text_with_ours(tree) == git(tree, "show", f"HEAD:{MODULE}")


def test_from_blank_to_an_engine_of_ones_own_and_back(tree, monkeypatch, tmp_path):
    """All exercises green, the whole chapter and the command line run on them; then restored."""
    write_answers(tree, ANSWERS)
    printed = run_all(tree, monkeypatch)
    wrong = {k: v for k, v in printed.items() if k.startswith("check-") and not v.startswith("✓")}
    assert not wrong
    assert f"{len(ANSWERS)} of {len(ANSWERS)} yours" in printed[cell_of("check", list(ANSWERS)[-1])]
    assert git(tree, "diff", "--name-only").split() == [MODULE, NOTEBOOK]
    assert text_with_ours(tree) == git(tree, "show", f"HEAD:{MODULE}")

    command = ["-m", "minivllm.cli.main", "generate", "hello", "--max-tokens", "5", "--seed", "1"]
    command += ["--model", str(make_checkpoint(tmp_path / "model"))]
    name = "block_manager.BlockPool.allocate"
    seen = 'print("the learner allocates")\n    return [take_one()'
    lay(tree, name, ANSWERS[name].replace("return [take_one()", seen))
    assert "the learner allocates" in run(tree, *command)

    run(tree, "-m", "course", "restore", *ANSWERS)
    assert git(tree, "status", "--porcelain").split() == ["M", NOTEBOOK]
    assert "the learner allocates" not in run(tree, *command)


def test_pytest_tests_the_learners_engine(tree):
    """With their wrong code it fails by the exercise's name, with their right code it passes."""
    name = "block_manager.BlockPool.share"
    command = ["-m", "pytest", "--nbval", "-q", "tests/test_block_manager.py"]
    counts_only = "for block_id in block_ids:\n        self.ref_counts[block_id] += 1"
    lay(tree, name, f"def share(self, block_ids):\n    {counts_only}")
    assert f"not right yet  {name}" in run(tree, *command, code=1)
    lay(tree, name, ANSWERS[name])
    assert "failed" not in run(tree, *command)
