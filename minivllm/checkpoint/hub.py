"""From a model's name to a checkpoint directory: built-in, yours, or from the Hugging Face Hub.

Only data is downloaded: no pickle, no code. Does not handle the built-in model (see
`builtin_model`) and reading a checkpoint (see `weights`). Not built in the course.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minivllm.checkpoint.builtin_model import BUILTIN_MODELS, builtin_dir, cache_dir
from minivllm.model_config import ModelConfig
from minivllm.text.tokenizer_json import read_json

# What the engine reads; none of it can run.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
WEIGHTS = "*.safetensors"
# Files in folders belong to other programs; consolidated* are the same weights once more.
UNWANTED = ("*/*", "consolidated*")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# What a clone made without Git LFS has in place of a large file.
LFS_POINTER = b"version https://git-lfs"

# "Qwen/Qwen3-0.6B" or "Qwen/Qwen3-0.6B@revision"
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
ALTERNATIVES = "Instead, give a checkpoint directory, or the built-in model smollm2-135m"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """Return the directory of the checkpoint called `name`: config.json, safetensors,
    tokenizer.json.

    A built-in name ("smollm2-135m") comes first; a directory with that name is reached as
    "./smollm2-135m". Then an existing directory. Any other string "owner/name" or
    "owner/name@revision" is a model on the Hub, downloaded into the Hub's own cache.
    Raises ValueError, with the remedy, for an unknown name, an incomplete directory, a failed
    download and a cache that cannot be written.
    """
    for model in BUILTIN_MODELS:
        if name == model.name:
            return builtin_dir(model, cache_dir())
    directory = Path(os.path.expanduser(name))
    is_hub_name = isinstance(name, str) and HUB_NAME.fullmatch(name)
    if is_hub_name and not directory.exists():
        return fetch_repository(str(name)).resolve()
    if not directory.is_dir():
        raise ValueError(_unknown_name(str(name), directory.exists()))
    check_directory(directory, str(directory), "Get the missing files from the model's source")
    return directory.resolve()


def _unknown_name(name: str, is_file: bool) -> str:
    known = [model.name for model in BUILTIN_MODELS]
    what = "a file" if is_file else "neither a built-in model nor a directory"
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    return (
        f"model={name!r} is {what}. {meant}Built-in models: {', '.join(known)}. A directory works"
        " too, if it holds config.json, *.safetensors and tokenizer.json; so does a model on the"
        " Hugging Face Hub by its full name, such as Qwen/Qwen3-0.6B"
    )


def check_directory(
    directory: Path,
    where: str,
    remedy: str,
    required: Iterable[str] = ("config.json", "tokenizer.json", WEIGHTS),
) -> None:
    """Raise ValueError, naming `where` and what is wrong, unless `directory` holds a file for
    each pattern in `required` and none of the files that the engine reads is a Git LFS pointer."""
    files = list(directory.iterdir()) if directory.is_dir() else []
    wanted = [file for file in files if _is_wanted(file.name)]
    for file in wanted:
        with file.open("rb") as content:
            if content.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in"
                    f" {directory}"
                )
    missing = [p for p in required if not any(fnmatch(file.name, p) for file in wanted)]
    if WEIGHTS in missing and (pickles := [file for file in files if file.suffix in PICKLES]):
        raise ValueError(
            f"{where} holds its weights as a pickle ({min(pickles).name}): safetensors only,"
            " because loading a pickle runs any code in it. Get the model's safetensors, or, if you"
            " trust the file, load it with transformers and save it with save_pretrained"
        )
    if missing:
        raise ValueError(
            f"{where} is not a complete checkpoint: it has no {', no '.join(missing)}. {remedy}"
        )


def _is_wanted(name: str) -> bool:
    is_unwanted = any(fnmatch(name, pattern) for pattern in UNWANTED)
    return not is_unwanted and any(fnmatch(name, pattern) for pattern in (*SMALL_FILES, WEIGHTS))


# -- the Hub --


def fetch_repository(name: str) -> Path:
    """Return the directory of the Hub's model `name` in its cache; download what is not there.

    An interrupted download is resumed. If the Hub does not answer, a complete copy in the cache
    is used. A model that the engine cannot run is refused before its weights are downloaded.
    """
    match = HUB_NAME.fullmatch(name)
    assert match is not None, f"{name!r} is not a name of the Hub"
    remedy = f"Choose another repository of this model. {ALTERNATIVES}"
    directory = _snapshot(match[1], match[2], SMALL_FILES)
    check_directory(directory, name, remedy, ("config.json", "tokenizer.json"))
    try:
        ModelConfig.from_dict(read_json(directory / "config.json"))
    except ValueError as error:
        message = f"{name} cannot be used, its weights were not downloaded: {error}"
        raise ValueError(message) from error
    directory = _snapshot(match[1], match[2], (*SMALL_FILES, WEIGHTS))
    check_directory(directory, name, f"Only safetensors are read. {remedy}")
    return directory


def _snapshot(repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    kept: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": list(UNWANTED)}
    try:
        return Path(str(snapshot_download(repo, revision=revision, **kept)))
    except Exception as error:  # of the library, or of one of three HTTP libraries below it
        name = f"{repo}@{revision}" if revision else repo
        raise ValueError(
            f"model={name!r} is not a directory here and cannot be downloaded from the Hub:"
            f" {_reason(error)}. {ALTERNATIVES}"
        ) from error


def _reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    # A failed look-up arrives wrapped in the library's "not in the cache".
    answers = [getattr(e, "response", None) for e in (error, error.__cause__)]
    status = next((answer.status_code for answer in answers if answer is not None), None)
    if isinstance(error, errors.GatedRepoError):
        return "it is gated; accept its licence on the model's page, then run `hf auth login` here"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such model; check the spelling, or, if it is private, run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; without @... it is main"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        remedy = "free some space, or set HF_HOME to a directory on another disk"
        return f"its cache {constants.HF_HUB_CACHE} cannot be written ({error}); {remedy}"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the Hub's cache has no complete copy; unset it once"
    if status in (401, 403):
        return "your access token is not valid for it; run `hf auth login` with one that is"
    if status == 429:
        return "too many requests from you; wait some minutes, or run `hf auth login`"
    if status is not None:
        return f"the Hub answers with status {status}; try again later"
    said = (str(error).strip() or "no message").splitlines()[0][:200]
    return (
        f"the Hub cannot be reached ({type(error).__name__}: {said}), and its cache has no complete"
        " copy; check the network and try again, what has arrived is kept"
    )
