"""Every exercise, built in one kernel with engines that live on. A script: run it on a sandbox.

Each build lays a version that notes its name when it runs. An engine made before it must run that
version in its next answer, or the build must have named the engine; whatever a new engine runs, a
new engine runs from now on. `%restore` brings our version back, and `%undo` the learner's.
"""

import ast
import builtins
import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

sys.path.insert(0, str(Path(__file__).parent))

SETTINGS = {"device": "cpu", "progress": False, "max_num_seqs": 4, "num_kv_blocks": 6}
KINDS = {
    "plain": {"attention_backend": "torch"},
    "recorded": {"attention_backend": "torch", "enforce_eager": False, "overlap": True},
    "kernels": {"attention_backend": "triton"},
    "ranks": {"attention_backend": "torch", "tensor_parallel_size": 2},
}
# What no engine on a CPU runs, and what runs it.
ALSO_RUN = {
    "naive.generate_tokens": (
        "from minivllm.measure.naive import naive;naive.generate_tokens(lambda text: [0.0], [1], 1)"
    ),
    "sampler.gumbel_sample": (
        "import torch; from minivllm.sampler import gumbel_sample;"
        "gumbel_sample(torch.ones(1, 8), torch.ones(1), *torch.ones(2, 1).long())"
    ),
}

# Runs while an engine is made, to size its rows, and again for each request.
ASKED_AGAIN = ("block_manager.blocks_for",)


def marked(reference: str, word: str) -> str:
    """The reference, which first notes that it runs."""
    node = ast.parse(reference).body[0]
    assert isinstance(node, ast.FunctionDef)
    first = node.body[1 if ast.get_docstring(node) else 0]
    lines = reference.split("\n")
    lines.insert(
        first.lineno - 1, " " * first.col_offset + f"__import__('builtins').seen.add({word!r})"
    )
    return "\n".join(lines)


def with_merges(checkpoint: Path) -> Path:
    """Give the tokenizer three merges, so that words are encoded by them."""
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] |= {"lo": 259, "low": 260, "er": 261}
    tokenizer["model"]["merges"] = ["l o", "lo w", "e r"]
    path.write_text(json.dumps(tokenizer))
    return checkpoint


class Kernel:
    """A notebook with the living engines in its variables."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.number = 0
        self.shell = InteractiveShell.instance()
        self.run("%load_ext course")
        self.run("from minivllm import LLM, SamplingParams")
        self.run(
            "MANY = [SamplingParams(temperature=t, top_p=p, seed=1, repetition_penalty=r,"
            " max_tokens=12, ignore_eos=True)"
            " for t, p, r in [(0, 1, 1), (1, 0.5, 1.2), (1, 1, 1), (1, 1, 1)]]\n"
            "FEW = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)"
        )
        self.run("from course.props.ranks import ranks_as_threads")

    def run(self, source: str) -> str:
        out = StringIO()
        with redirect_stdout(out):
            self.shell.run_cell(source).raise_error()
        return out.getvalue()

    def make(self, kind: str, name: str) -> set[str]:
        """Make an engine called `name`; what ran meanwhile."""
        builtins.seen = set()
        call = f"{name} = LLM({self.model!r}, **{SETTINGS | KINDS[kind]})"
        self.run(f"with ranks_as_threads():\n    {call}" if kind == "ranks" else call)
        return builtins.seen

    def ask(self, name: str) -> set[str]:
        """What runs while an engine answers: text, a shared prefix, every setting, preemption."""
        builtins.seen = set()
        self.number += 1  # an engine remembers the words that it has met
        letters = "".join(chr(97 + self.number // 26**place % 26) for place in range(3))
        text = f"low lower lo{letters} " * 3
        if "kernels" in name:  # interpreted, which is slow; more keys than a tile has
            self.run(f"{name}.generate([[1], [2] * 66], FEW, use_tqdm=False)")
            return builtins.seen
        self.run(
            f"{name}.generate([{text!r}, {text!r}, [1, 2], [3] * 40], MANY, use_tqdm=False)\n"
            f"{name}.generate([[5, 6]], MANY[2], use_tqdm=False)\n"
            f"list({name}.stream('h\u00e9\u00e9', FEW))\n"
            f"for loop in {name}.engine.run, {name}.engine.run_overlapped:\n"
            f"    {name}.add_request([7, 8], FEW)\n"
            "    list(loop())"
        )
        time.sleep(0.05 * ("ranks" in name))  # the other rank may still be at its last step
        return builtins.seen


def kinds_for(name: str) -> list[str]:
    """The engines that are asked about an exercise."""
    module = name.split(".")[0]
    if module in ("kernels", "decode_attention"):
        return ["kernels"]
    if module in ("tensor_parallel", "leader"):
        return ["ranks"]
    return ["plain", "recorded"]


def main() -> None:
    """Run the sequence for each exercise; raises AssertionError where an engine runs old code."""
    from tiny_checkpoint import make_checkpoint

    from course import exercises as ex

    with tempfile.TemporaryDirectory() as folder:
        model = with_merges(make_checkpoint(Path(folder) / "model", vocab_size=262))
        kernel = Kernel(str(model))
        for kind in KINDS:
            kernel.make(kind, f"first_{kind}")
        for name, exercise in ex.exercises().items():
            if exercise.notebook[:2] in (sys.argv[1:] or exercise.notebook[:2]):
                drive(kernel, name, exercise.reference)
    assert set(ex.states().values()) == {"borrowed"}


def drive(kernel: Kernel, name: str, reference: str) -> None:
    """Build two versions, restore ours, undo that, restore again."""
    builds = [f"%%build {name}\n{marked(reference, f'{name} {number}')}" for number in (1, 2)]
    said = kernel.run(builds[0])
    kinds, made = kinds_for(name), set()
    for kind in kinds:
        made |= kernel.make(kind, f"new_{kind}")
        if f"{name} 1" in made and name not in ASKED_AGAIN:
            assert f"`first_{kind}`" in said, f"{name}: {said}"
    ran = made | expect(kernel, name, 1, said)
    assert f"{name} 1" in ran, f"{name}: no engine runs it, and ALSO_RUN does not name it"
    expect(kernel, name, 2, kernel.run(builds[1]))
    expect(kernel, name, None, kernel.run(f"%restore {name}"))
    expect(kernel, name, 2, kernel.run(f"%undo {name}"))
    expect(kernel, name, None, kernel.run(f"%restore {name}"))
    for kind in kinds:
        kernel.run(f"new_{kind}.close()")


def expect(kernel: Kernel, name: str, number: int | None, said: str) -> set[str]:
    """Each living engine runs that version and no other, or `said` names it."""
    all_seen = set()
    if name in ALSO_RUN:
        builtins.seen = set()
        kernel.run(ALSO_RUN[name])
        all_seen = builtins.seen
        assert all_seen == ({f"{name} {number}"} if number else set()), f"{name}: {all_seen}"
    for kind in kinds_for(name):
        for engine in (f"first_{kind}", f"new_{kind}"):
            seen = kernel.ask(engine)
            old = {word for word in seen if word.startswith(name + " ")} - {f"{name} {number}"}
            assert not old or f"`{engine}`" in said, f"{name} {number}: {engine} runs {old}\n{said}"
            all_seen |= seen
    return all_seen


if __name__ == "__main__":
    main()
