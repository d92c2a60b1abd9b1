"""Fill a model from a checkpoint directory: `config.json` and safetensors, one tensor at a time.

Does not handle downloads (see `hub`) or formats that can run code: a pickle is never opened.
Not built in the course.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from minivllm import ops as torch_ops
from minivllm.model import CausalLM, Codes, Embedding, Linear, Ops
from minivllm.model_config import ModelConfig
from minivllm.text.tokenizer_json import read_json

# What a clone made without Git LFS has in the place of a large file.
LFS_POINTER = b"version https://git-lfs"
# The weights of a quantized model once more, as codes; see `read_codes`.
CODES_FILE = "codes.safetensors"
# The products that the model does in one go, and the checkpoint's names of their parts.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StoredTensor:
    """A tensor in a file, of which only what is indexed is read: `stored[:]` is all of it."""

    def __init__(self, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self._slice[index]
        return tensor


# Name and value in the checkpoint -> what of it this model holds.
Take = Callable[[str, StoredTensor], Tensor]


def take_all(name: str, stored: StoredTensor) -> Tensor:
    """The whole tensor."""
    return stored[:]


def read_config(path: str | Path) -> ModelConfig:
    """What `config.json` in the directory `path` says of the model.

    Raises ValueError if `config.json` is missing or no JSON object, or for a model that is not
    supported.
    """
    return ModelConfig.from_dict(_read_json(Path(path) / "config.json"))


def load_model(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int,
    *,
    ops: Ops = torch_ops,
    take: Take = take_all,
    progress: bool = True,
) -> CausalLM:
    """A `CausalLM` of `dtype` on `device`, filled from the safetensors in the directory `path`.

    `max_len` is the number of positions it can run, `ops` does its arithmetic, `take` reads what
    it needs of each tensor, `progress` draws a bar on stderr. Besides the model, memory holds
    about one tensor of the checkpoint at a time.
    Raises ValueError, naming the tensors, if the checkpoint lacks one, has one too many, or
    has one of another shape than `config` says.
    """
    model = CausalLM(config, max_len, ops=ops, dtype=dtype, device=device)
    load_weights(model, path, config, take=take, progress=progress)
    codes_file = Path(path) / CODES_FILE
    if torch.device(device).type == "cpu" and codes_file.exists():
        read_codes(model, codes_file, take)
    return model


def load_weights(
    model: nn.Module,
    path: str | Path,
    config: ModelConfig,
    *,
    take: Take = take_all,
    progress: bool = True,
) -> None:
    """Copy every tensor of the checkpoint into its place in `model`; arguments and errors are those
    of `load_model`."""
    open_places = places(model, config)
    filled, unexpected = set(), []
    with tqdm(total=len(open_places), desc="weights", unit="", disable=not progress) as bar:
        for name, stored in read_tensors(checkpoint_files(path)):
            if name in open_places:
                _copy(name, take(name, stored), open_places.pop(name))
                filled.add(name)
                bar.update()
            elif name in filled:
                raise ValueError(f"{path} has {name} twice, in two files; which one is right?")
            elif not is_ignored(name, config):
                unexpected.append(name)
    if unexpected:
        raise ValueError(
            f"{path} has tensors that the model of its config.json has no place for:"
            f" {_listed(unexpected)}"
        )
    _refuse_missing(list(open_places), path)


def places(model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes, by its name there: views of the parameters.

    Names are the checkpoint's own, but for the products that the model does in one go, whose
    rows lie one after the other. Example with 9 query and 3 key heads of 64:
    "model.layers.3.self_attn.k_proj.weight" -> rows 576-767 of
    "model.layers.3.self_attn.qkv_proj.weight".
    """
    kv_size = config.num_kv_heads * config.head_dim
    sizes = {
        "qkv_proj": [config.num_heads * config.head_dim, kv_size, kv_size],
        "gate_up_proj": [config.intermediate_size] * 2,
    }
    found = {}
    for name, parameter in model.named_parameters():
        module, kind = name.split(".")[-2:]  # "qkv_proj", "weight"
        parts = MERGED.get(module, (module,))
        rows_of_parts = parameter.data.split(sizes.get(module, [len(parameter)]))
        for part, rows in zip(parts, rows_of_parts, strict=True):
            found[name.replace(f"{module}.{kind}", f"{part}.{kind}")] = rows
    return found


def read_codes(model: nn.Module, file: Path, take: Take = take_all) -> None:
    """Give every product of the model, and its embedding, the `codes` that the file has for it.

    Weight "model.norm.weight" would have the tensors "model.norm.codes" and "model.norm.scales",
    in the form of `model.Codes`. Parts of one product must have as many bits each.
    """
    with _open(file) as tensors:
        names = set(tensors.keys())

        def read(parts: list[str], kind: str) -> Tensor:
            found = [take(f"{p}.{kind}", StoredTensor(tensors, f"{p}.{kind}")) for p in parts]
            return torch.cat(found)

        for name, module in model.named_modules():
            if isinstance(module, Linear | Embedding):
                outer, _, last = name.rpartition(".")
                parts = [f"{outer}.{part}" for part in MERGED.get(last, (last,))]
                if all(f"{part}.codes" in names for part in parts):
                    module.codes = Codes(read(parts, "codes"), read(parts, "scales").float())


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold the tensor `name` although the model has no use for it.

    Old Llama checkpoints hold the RoPE frequencies, which the model computes; some hold
    `lm_head.weight` although it is tied to the embedding.
    """
    tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")


def checkpoint_files(path: str | Path) -> list[Path]:
    """The safetensors files of the checkpoint in the directory `path`: one, or all its shards.

    Raises ValueError if there are none, or if one that the index lists is missing.
    """
    folder = Path(path)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ValueError(
            f"{folder} has no model.safetensors and no model.safetensors.index.json; other"
            " formats are not read: save the model again with safe_serialization=True"
        )
    files = [folder / name for name in _shard_names(index)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"{folder} lacks {_listed(missing)}, which {index.name} names")
    return files


def _shard_names(index: Path) -> list[str]:
    shards = _read_json(index).get("weight_map")
    names = set(shards.values()) if isinstance(shards, dict) else set()
    # A name with a folder in it could point anywhere on the disk.
    if not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
        raise ValueError(f"{index} has no weight_map of tensors to file names; download it again")
    return sorted(names)


def read_tensors(files: list[Path]) -> Iterator[tuple[str, StoredTensor]]:
    """Name and value of every tensor in `files`; a value is read when it is indexed.

    Raises ValueError for a file that is damaged or cut short.
    """
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a file handle, no dict)
                yield name, StoredTensor(tensors, name)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        with file.open("rb") as start:
            if start.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in"
                    f" {file.parent}"
                ) from error
        raise ValueError(f"{file} is damaged ({error}); download it again") from error


def _copy(name: str, tensor: Tensor, place: Tensor) -> None:
    if tensor.shape != place.shape:
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)}, but config.json asks for"
            f" {list(place.shape)}: the two are not of the same model"
        )
    if tensor.dtype not in FLOATS:
        # Float8 too: without its scales it is as little a weight as an integer.
        raise ValueError(
            f"{name} is {tensor.dtype}: quantized weights are not supported; take the unquantized"
            " checkpoint"
        )
    place.copy_(tensor)  # converts the dtype and crosses to the device
    if not _is_finite(place):
        remedy = "download the checkpoint again"
        if _is_finite(tensor):
            remedy = f'it is too large for {place.dtype}: load with dtype="bfloat16" or "float32"'
        raise ValueError(f"{name} holds numbers that are not finite; {remedy}")


def _is_finite(tensor: Tensor) -> bool:
    low, high = tensor.aminmax()  # NaN wins in both
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _refuse_missing(names: list[str], path: str | Path) -> None:
    if names == ["lm_head.weight"]:
        raise ValueError(
            f"{path} has no lm_head.weight, and tie_word_embeddings is false in its config.json;"
            " if the embedding is the output layer too, set tie_word_embeddings to true there"
        )
    if names:
        raise ValueError(f"{path} lacks tensors of its model: {_listed(names)}")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ValueError(f"{file.parent} has no {file.name}; is it a checkpoint directory?")
    return read_json(file)


def _listed(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
