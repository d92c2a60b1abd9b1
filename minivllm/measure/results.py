"""Results of measurements: percentiles, facts about the machine, files and tables.

A result is a self-contained dict: numbers, machine, versions, command and date. A file is a list
of results. Does not measure (see `measure.workloads`). Not built in the course.
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

# Keys that every result has; most have more.
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
    """Return the 50th, 90th and 99th percentile and the maximum, or None without values."""
    if not values:
        return None
    named = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {**named, "max": max(values)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value at `percent` per cent of the way along the sorted values.

    n sorted values are at places 0 to n - 1, and the value changes linearly between two places:
    of 40, 10, 30, 20 the 50th percentile is at place 1.5 and is 25, the 90th is at place 2.7 and
    is 37. `percent` is from 0 to 100. `values` may be in any order and isn't changed. Raises
    ValueError if it is empty.
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
    """Return machine, versions, command, date and the settings that decide the speed.

    `config` has every setting filled in. `model` replaces its name of the model.
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
    """Return the versions, the command and the date of a measurement."""
    return {
        "versions": versions(),
        "command": command_line(sys.argv),
        "date": datetime.date.today().isoformat(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect speed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_device(device: str) -> str:
    """Return the device in words: "NVIDIA H200", or a CPU, its threads and vector units."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    units = torch.backends.cpu.get_cpu_capability()
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {units}"


def cpu_name() -> str:
    """Return the processor's name, or its architecture ("x86_64") if it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command_line(argv: Sequence[str]) -> str:
    """Return the command without this machine's folders: "minivllm bench", or
    "python benchmarks/offline.py --repeats 3"."""
    name = Path(argv[0]).name
    program = ["minivllm"] if name in ("minivllm", "__main__.py") else ["python", name]
    if name.endswith(".py") and name != "__main__.py":
        program = ["python", f"benchmarks/{name}"]
    arguments = [Path(text).name if os.path.isabs(text) else text for text in argv[1:]]
    return shlex.join([*program, *arguments])


# -- files -------------------------------------------------------------------------------------


def check_result(result: Result) -> None:
    """Raise ValueError if a result lacks a required key."""
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
    """Read the results of a file. Raises ValueError if it doesn't hold a list of results."""
    results = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
        raise ValueError(f"{path.name} does not hold a list of results")
    for result in results:
        check_result(result)
    return results


def result_path(kind: str, device: str, directory: Path) -> Path:
    """Return the path that `--save` writes: "2026-11-29-cpu-offline.json" in `directory`."""
    device_type = device.partition(":")[0]
    return directory / f"{datetime.date.today().isoformat()}-{device_type}-{kind}.json"


def require_writable(path: Path) -> None:
    """Raise ValueError if a file can't be written there. Call it before the work starts."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(
            f"cannot write {path}: the folder {path.parent} does not exist; make it first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}: no permission; choose another place")


# -- tables ------------------------------------------------------------------------------------


HEADER = ("workload", "output tok/s", "decode tok/s", "prompt tok/s", "TTFT", "between", "p99")
# The same for a terminal of 100 columns.
SHORT_HEADER = ("workload (tok/s)", "output", "decode", "prompt", "TTFT", "between", "p99")
WIDTHS = (39, 8, 8, 8, 8, 8, 7)


def table_cells(result: Result) -> list[str]:
    """Return a row of `HEADER`: speeds in tokens per second, then milliseconds to the first token
    (median) and between tokens (median, 99th percentile); "-" if it wasn't measured."""
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
    """Return a speed in three digits, which is all a shared machine can promise: "9.12"."""
    if tokens_per_s is None:
        return "-"
    return f"{tokens_per_s:.3g}" if tokens_per_s < 100 else f"{tokens_per_s:,.0f}"


def milliseconds(seconds: float | None) -> str:
    """Return seconds in milliseconds: 0.0312 -> "31 ms", 0.00123 -> "1.2 ms", None -> "-"."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"


def text_table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> str:
    """Return rows for a terminal: first column left-aligned, the others right-aligned."""
    lines = []
    for row in rows:
        first, *rest = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows for a README: numbers right-aligned."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
