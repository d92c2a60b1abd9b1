"""A model of the Hugging Face Hub by its name: "owner/name" becomes a directory in its cache.

What cannot be served is refused by the list of files and by `config.json`, before the weights
are fetched. Only data is fetched: no pickle, no code. Leaves out built-in models (`hub`) and
reading a checkpoint (`weights`). Given (no notebook builds it).
"""

from __future__ import annotations

import errno
import importlib
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minivllm.model_config import ModelConfig
from minivllm.text.tokenizer_json import read_json

# Everything that the engine reads, and nothing that can run.
WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
)
# Files in folders belong to other programs; consolidated* are the same weights once more.
UNWANTED = ("*/*", "consolidated*")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

ALTERNATIVES = "Instead, give a checkpoint directory, or the built-in model smollm2-135m"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub, and which state of it."""

    repo: str  # "Qwen/Qwen3-0.6B"
    revision: str | None = None  # a branch, tag or commit; None: main

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_name(name: str) -> HubName | None:
    """The repository that `name` spells, or None if it spells none.

    "Qwen/Qwen3-0.6B" and "Qwen/Qwen3-0.6B@main" do; "./Qwen" and "smollm2-135m" do not.
    """
    match = _NAME.fullmatch(name)
    return HubName(match[1], match[2]) if match else None


def fetch_repository(name: HubName, library: Any = None) -> Path:
    """The directory of the checkpoint `name` in the Hub's cache, fetched where it is not there.

    A fetch that was broken off is resumed. Where the Hub does not answer, the copy in the cache
    serves. `library` is `huggingface_hub`, or a stand-in for it.
    Raises ValueError, with the remedy, for what does not exist, may not be read, cannot be
    reached or is not supported.
    """
    library = library or import_library()
    try:
        info = library.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except Exception as error:  # of the library, or of one of three HTTP libraries under it
        return _cached_copy(name, library, error)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    check_files(str(name), sizes, f"Choose another repository of this model. {ALTERNATIVES}")
    try:
        # By the commit: whatever is pushed meanwhile, list and file are of one state.
        config = library.hf_hub_download(name.repo, "config.json", revision=info.sha)
        _check_config(name, Path(config))
        missing = _missing(name.repo, info.sha, sizes, library)
        if not missing:
            return Path(_snapshot(name.repo, info.sha, library, local_files_only=True))
        _check_free_space(name, sum(missing.values()), library)
        # By the name that was asked for: so the cache can answer for it without the network.
        return Path(_snapshot(name.repo, name.revision, library))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(explain(name, error, library)) from error


def import_library() -> Any:
    """The package `huggingface_hub`; ValueError, with the remedy, where it is not installed."""
    try:
        importlib.import_module("huggingface_hub.errors")
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            "models from the Hub need the package huggingface_hub (pip install huggingface_hub);"
            f" importing it says: {error}. {ALTERNATIVES}"
        ) from error


def check_files(where: str, names: Iterable[str], remedy: str) -> None:
    """Raise ValueError, saying what is missing, unless `names` are the files of a checkpoint."""
    found = list(names)
    wanted = [name for name in found if _is_wanted(name)]
    weights = [name for name in wanted if name.endswith(".safetensors")]
    pickles = sorted(name for name in found if name.endswith(PICKLE_SUFFIXES))
    if pickles and not weights:
        raise ValueError(
            f"{where} holds its weights as pickle ({pickles[0]}): safetensors only, because"
            " loading a pickle runs whatever code is in it. Get the model's safetensors, or, if"
            " you trust the file, load it with transformers and save it with save_pretrained"
        )
    missing = [name for name in ("config.json", "tokenizer.json") if name not in wanted]
    missing += [] if weights else ["*.safetensors"]
    if missing:
        raise ValueError(
            f"{where} is no complete checkpoint: it has no {', no '.join(missing)}. {remedy}"
        )


def explain(name: HubName, error: Exception, library: Any) -> str:
    """What the library's `error` means for somebody who asked for `name`, and what to do."""
    errors, status = library.errors, _status(error)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name.repo} is gated: only those who have accepted its licence may download it."
            " Accept it on the model's page on the Hub, then log in here with `hf auth login`."
            f" {ALTERNATIVES}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"model={str(name)!r} is neither a directory here nor a model on the Hub that you may"
            " read. Check the spelling; if it is private, log in with `hf auth login`."
            f" {ALTERNATIVES}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision!r}; without @... it is main"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return (
            f"the Hub's cache {_cache(library)} cannot take {name}: {error}. Free some space, or"
            " set HF_HOME to a directory on another disk"
        )
    return (
        f"model={str(name)!r} is no directory here, and cannot be fetched from the Hub:"
        f" {_reason(error, status, errors)}. {ALTERNATIVES}"
    )


def _reason(error: Exception, status: int | None, errors: Any) -> str:
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and the Hub's cache has no whole copy of it; unset it once"
    if status == 401:
        return "the Hub does not know your access token; log in again with `hf auth login`"
    if status == 403:
        return "your access token may not read it; `hf auth login` with one that may"
    if status == 429:
        return "the Hub has had too many requests from you; wait some minutes, or `hf auth login`"
    if status is not None:
        return f"the Hub answers with status {status}; try again later"
    said = (str(error).strip() or "no message").splitlines()[0][:200]
    return (
        f"the Hub cannot be reached ({type(error).__name__}: {said}), and its cache has no whole"
        " copy. Check the network and try again: what has arrived is kept"
    )


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _cached_copy(name: HubName, library: Any, error: Exception) -> Path:
    status = _status(error)
    if status is not None and status < 500 and status != 429:
        raise ValueError(explain(name, error, library)) from error  # the Hub's last word
    try:
        directory = Path(_snapshot(name.repo, name.revision, library, local_files_only=True))
    except Exception:
        raise ValueError(explain(name, error, library)) from error
    if not isinstance(error, library.errors.OfflineModeIsEnabled):
        _say(f"the Hub does not answer ({type(error).__name__}); {name} is read from its cache")
    return directory


def _snapshot(repo: str, revision: str | None, library: Any, **options: Any) -> str:
    directory: str = library.snapshot_download(
        repo,
        revision=revision,
        allow_patterns=list(WANTED),
        ignore_patterns=list(UNWANTED),
        **options,
    )
    return directory


def _check_config(name: HubName, file: Path) -> None:
    try:
        ModelConfig.from_dict(read_json(file))
    except ValueError as error:
        raise ValueError(f"{name} cannot be used, its weights were not fetched: {error}") from error


def _is_wanted(name: str) -> bool:
    return _matches(name, WANTED) and not _matches(name, UNWANTED)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _missing(repo: str, commit: str, sizes: Mapping[str, int], library: Any) -> dict[str, int]:
    # The library answers with a path, None, or an object that stands for "does not exist".
    cached = library.try_to_load_from_cache
    return {
        file: size
        for file, size in sizes.items()
        if _is_wanted(file) and not isinstance(cached(repo, file, revision=commit), str)
    }


def _cache(library: Any) -> Path:
    return Path(library.constants.HF_HUB_CACHE)


def _check_free_space(name: HubName, needed: int, library: Any) -> None:
    cache = _cache(library)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"{name} needs {needed / 1e6:,.0f} MB more, {cache} has {free / 1e6:,.0f} MB free. Free"
            " some space, or set HF_HOME to a directory on another disk"
        )
    _say(f"fetching {name}: {needed / 1e6:,.0f} MB, once, into {cache}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
