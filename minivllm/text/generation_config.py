"""How a checkpoint wants its answers sampled: the settings in its `generation_config.json`.

Does not handle end-of-sequence ids (see `text.tokenizer_json`). Not built in the course.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.config import require_bool
from minivllm.request import SamplingParams
from minivllm.text.tokenizer_json import read_if_present

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def generation_defaults(path: str | Path) -> dict[str, Any]:
    """Return the sampling settings that the checkpoint directory `path` declares.

    Those of `FIELDS` that are there, as `SamplingParams` takes them. `"do_sample": false` means
    the most probable token each time: `{"do_sample": false, "top_p": 0.9, "repetition_penalty":
    1.1}` gives `{"temperature": 0.0, "repetition_penalty": 1.1}`; no file gives `{}`.
    Raises ValueError, naming file and field, for an impossible value.
    """
    file = Path(path) / "generation_config.json"
    raw = read_if_present(file)
    found = {name: raw[name] for name in FIELDS if raw.get(name) is not None}
    is_greedy = raw.get("do_sample") is False
    try:
        params = SamplingParams(**found)
        if raw.get("do_sample") is not None:
            require_bool("do_sample", raw["do_sample"])
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if is_greedy:
        penalty = {"repetition_penalty"} & found.keys()
        return {"temperature": 0.0} | {name: getattr(params, name) for name in penalty}
    return {name: getattr(params, name) for name in found}
