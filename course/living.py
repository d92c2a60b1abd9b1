"""Which living engines go on with an older version of an exercise, in words for the learner.

`reload` brings new code to every object. It cannot change what an engine computed when it was made,
steps that are recorded, or other processes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

AT_START = ("engine.build_engine",)
# While an engine of several ranks is made.
AT_START_OF_RANKS = (
    "tensor_parallel.kv_heads_of",
    "tensor_parallel.part_of",
    "tensor_parallel.cut",
)
# While the steps of an engine are recorded.
RECORDING = ("bucket_sizes", "Tape.record", "GraphedFunction.capture")
# Modules whose functions run inside a recorded step.
RECORDED = {"ops", "model", "kernels", "decode_attention", "step_input", "model_runner"}
RECORDED |= {"drawing", "sampler"}
ENCODING = ("tokenizer.best_pair", "tokenizer.merge_pair", "tokenizer.encode_word")


def notes(names: Collection[str], namespace: Mapping[str, Any]) -> list[str]:
    """One line for each variable whose engine goes on with an older version of an exercise.

    Example: "`llm` was made before: it replays steps that are recorded. Make it again: run
    `llm.close()`, then the cell that makes it."
    """
    return [
        f"`{variable}` was made before: {why}. To have all of your version, run"
        f" `{variable}.close()`, then the cell that makes it."
        for variable, engine in _engines(namespace)
        if (why := _why(engine, names))
    ]


def _engines(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The engines in the notebook's variables, those that are open."""
    llm, engine = sys.modules.get("minivllm.llm"), sys.modules.get("minivllm.engine")
    if llm is None or engine is None:
        return
    for variable, value in namespace.items():
        if variable.startswith("_"):
            continue  # IPython's: the last results
        if isinstance(value, engine.Engine):
            yield variable, value
        elif isinstance(value, llm.LLM):
            with suppress(RuntimeError):  # closed
                yield variable, value.engine


def _why(engine: Any, names: Collection[str]) -> str | None:
    config = engine.config
    has_ranks, has_graphs = config.tensor_parallel_size > 1, not config.enforce_eager
    if has_ranks and not hasattr(engine.runner.group, "threads"):
        return "its other ranks are processes of their own, with the code of then"
    for name in names:
        module, _, inner = name.partition(".")
        if name in AT_START or (has_ranks and name in AT_START_OF_RANKS):
            return f"it keeps what `{inner}` gave it then"
        if has_graphs and module == "cuda_graphs" and inner in RECORDING:
            return f"it keeps the graphs that it recorded with the `{inner}` of then"
        if has_graphs and module in RECORDED:
            return f"it replays steps that it recorded with the `{inner}` of then"
        if name in ENCODING:
            return "it remembers the tokens of the words that it has met"
    return None
