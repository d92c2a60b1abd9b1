"""How a checkpoint wants its answers sampled: the settings in its `generation_config.json`.

Leaves out end-of-sequence ids (`text.tokenizer_json`), and whoever asks for other settings. Given
(no notebook builds it).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from minivllm.config import require_bool, require_int, require_number
from minivllm.text.tokenizer_json import read_if_present

# Setting -> lowest and highest value, and whether the lowest is itself allowed.
RANGES = {
    "temperature": (0.0, math.inf, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, math.inf, False),
}


def generation_defaults(path: str | Path) -> dict[str, Any]:
    """The sampling settings that the checkpoint directory `path` declares, by our names for them.

    Among temperature, top_k, top_p, min_p and repetition_penalty those that are there; other
    fields are not read. `"do_sample": false` means the most probable token each time:
    `{"do_sample": false, "top_p": 0.9, "repetition_penalty": 1.1}` gives
    `{"temperature": 0.0, "repetition_penalty": 1.1}`; no file gives `{}`.
    Raises ValueError, naming file and field, for a value that is impossible.
    """
    file = Path(path) / "generation_config.json"
    raw = read_if_present(file)
    given = {name: value for name, value in raw.items() if value is not None}
    defaults: dict[str, Any] = {}
    for name, (low, high, included) in RANGES.items():
        if name in given:
            where = f"{name} in {file}: {name}"
            require_number(where, given[name], low, high, open_low=not included)
            defaults[name] = float(given[name])
    if "top_k" in given:
        defaults["top_k"] = _top_k(given["top_k"], file)
    if "do_sample" in given:
        require_bool(f"do_sample in {file}: do_sample", given["do_sample"])
        if not given["do_sample"]:
            return {"temperature": 0.0} | _only(defaults, "repetition_penalty")
    return defaults


def _top_k(value: object, file: Path) -> int:
    # Some files write -1, as vLLM does, where others write 0 for all tokens.
    require_int(f"top_k in {file}: top_k", value, -1)
    assert isinstance(value, int), "require_int has seen to it"
    return max(value, 0)


def _only(defaults: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: defaults[name]} if name in defaults else {}
