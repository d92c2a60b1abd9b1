"""A small LLM inference engine in the shape of vLLM.

    from minivllm import LLM, SamplingParams

Names are looked up at their first use (PEP 562), so that `import minivllm` takes no time and
`import minivllm.scheduler` brings no torch. Given (no notebook builds it).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time see `__getattr__`
    from minivllm.config import EngineConfig
    from minivllm.llm import LLM
    from minivllm.request import RequestOutput, SamplingParams
    from minivllm.trace import Trace

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "Trace", "__version__"]

_HOME_OF = {
    "LLM": "minivllm.llm",
    "EngineConfig": "minivllm.config",
    "RequestOutput": "minivllm.request",
    "SamplingParams": "minivllm.request",
    "Trace": "minivllm.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    # Not kept in globals(): after a module was imported afresh, its new class is found.
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
