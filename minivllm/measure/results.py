"""Results of measurements: percentiles, what makes them comparable, files, tables.

A result is a dict that stands alone: figures, machine, versions, command and date. A file is a
list of them. Does not measure (see `measure.workloads`). Not built in the course.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.config import EngineConfig

Result = Mapping[str, Any]

# What every result says; most say more.
REQUIRED = (
    "workload",
    "device",
    "output_tokens_per_s",
    "prompt_tokens_per_s",
    "seconds",
    "versions",
    "command",
    "date",
)
PACKAGES = ("minivllm", "torch", "triton", "numba", "transformers", "llama-cpp-python", "vllm")


# -- figures -----------------------------------------------------------------------------------


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The 50th, 90th and 99th percentile and the largest; None of nothing."""
    if not values:
        return None
    named = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {**named, "max": max(values)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that stands `percent` per cent of the way along the sorted values.

    Sorted, n values stand at the places 0 to n - 1. Between two places the value changes
    evenly: of 40, 10, 30, 20 the 50th percentile stands at place 1.5 and is 25, the 90th at
    place 2.7 and is 37, the 100th at place 3 and is 40. `percent` is from 0 to 100; `values`
    come in any order and are not changed. Raises ValueError if there are none.
    """
    if not values:
        raise ValueError("there is no percentile of 0 values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)  # the last value has no neighbour above it
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# -- where and how it was measured -------------------------------------------------------------


def facts(config: EngineConfig, model: str | None = None) -> dict[str, Any]:
    """Machine, versions, command and date, and the settings that decide the speed.

    `config` has every setting filled in; `model` names one that has no name of its own.
    """
    return {
        "model": model or config.model,
        "dtype": config.dtype,
        "device": config.device,
        "machine": describe_device(config.device),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        **provenance(),
    }


def provenance() -> dict[str, Any]:
    """With which versions, by which command and when something was measured."""
    return {
        "versions": versions(),
        "command": command_line(sys.argv),
        "date": datetime.date.today().isoformat(),
    }


def versions() -> dict[str, str]:
    """Of Python and of those packages that matter here and are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_device(device: str) -> str:
    """The device in words: "NVIDIA H200", or a CPU with its threads and vector units."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    units = torch.backends.cpu.get_cpu_capability()
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {units}"


def cpu_name() -> str:
    """What the system calls its processor, or else the kind of it ("x86_64")."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command_line(argv: Sequence[str]) -> str:
    """How to run it again, without the folders of this machine: "minivllm bench", or
    "python benchmarks/offline.py --repeats 3"."""
    name = Path(argv[0]).name
    program = ["minivllm"] if name in ("minivllm", "__main__.py") else ["python", name]
    if name.endswith(".py") and name != "__main__.py":
        program = ["python", f"benchmarks/{name}"]
    arguments = [Path(text).name if os.path.isabs(text) else text for text in argv[1:]]
    return shlex.join([*program, *arguments])


# -- files -------------------------------------------------------------------------------------


def check_result(result: Result) -> None:
    """Raise ValueError for a result that lacks something every result has."""
    missing = [name for name in REQUIRED if name not in result]
    if missing:
        raise ValueError(f"the result {result.get('workload')!r} lacks {', '.join(missing)}")


def save_results(path: Path, results: Sequence[Result]) -> None:
    """Write results as JSON, all or nothing: a reader never sees half a file."""
    for result in results:
        check_result(result)
    text = json.dumps(list(results), indent=1, allow_nan=False) + "\n"
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)  # a temporary file is private; a result is not
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def load_results(path: Path) -> list[dict[str, Any]]:
    """Read the results of a file. Raises ValueError if it does not hold a list of results."""
    results = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
        raise ValueError(f"{path.name} does not hold a list of results")
    for result in results:
        check_result(result)
    return results


def result_path(kind: str, device: str, directory: Path) -> Path:
    """Where `--save` writes: "2026-11-29-cpu-offline.json" in `directory`."""
    device_type = device.partition(":")[0]
    return directory / f"{datetime.date.today().isoformat()}-{device_type}-{kind}.json"


def require_writable(path: Path) -> None:
    """Raise ValueError if a file cannot be written there: asked before the work, not after."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}: no permission; choose another place")


# -- tables ------------------------------------------------------------------------------------


HEADER = ("workload", "output tok/s", "decode tok/s", "prompt tok/s", "TTFT", "between", "p99")
# The same for a terminal of 100 columns.
SHORT_HEADER = ("workload (tok/s)", "output", "decode", "prompt", "TTFT", "between", "p99")
WIDTHS = (39, 8, 8, 8, 8, 8, 7)


def table_cells(result: Result) -> list[str]:
    """One row of `HEADER`: speeds in tokens per second, then milliseconds to the first token
    (median) and between tokens (median and 99th percentile); "-" for what was not measured."""
    first = result.get("first_token_s") or {}
    between = result.get("inter_token_s") or {}
    prompt_speed = result.get("prefill_tokens_per_s") or result["prompt_tokens_per_s"]
    return [
        str(result["workload"]),
        speed(result["output_tokens_per_s"]),
        speed(result.get("decode_tokens_per_s")),
        speed(prompt_speed),
        milliseconds(first.get("p50")),
        milliseconds(between.get("p50")),
        milliseconds(between.get("p99")),
    ]


def speed(tokens_per_s: float | None) -> str:
    """Three digits are all that a measurement on a shared machine can promise: "9.12", "1,030"."""
    if tokens_per_s is None:
        return "-"
    return f"{tokens_per_s:.3g}" if tokens_per_s < 100 else f"{tokens_per_s:,.0f}"


def milliseconds(seconds: float | None) -> str:
    """0.0312 is "31 ms", 0.00123 is "1.2 ms"; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"


def text_table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> str:
    """Rows for a terminal: the first column to the left, the others to the right."""
    lines = []
    for row in rows:
        first, *rest = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows for a README: numbers to the right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
