"""The ranks that share a model: start them, send them the settings, agree on what fits in memory.

Does not handle how processes start and communicate (see `distributed`). Not built in the course.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from minivllm.assembly.devices import choose_device
from minivllm.checkpoint.weights import read_config
from minivllm.config import EngineConfig, known, replace
from minivllm.distributed.process_group import ProcessGroup
from minivllm.distributed.workers import Team as Team
from minivllm.distributed.workers import started_by_torchrun, torchrun_group
from minivllm.tensor_parallel import require_fit

WORKER = "minivllm.assembly.worker"  # the module that a worker process runs


def assemble(config: EngineConfig, path: Path) -> ProcessGroup | None:
    """Start the ranks that share the model in the directory `path`, and send them the settings;
    None if there is only one.

    Raises ValueError for a model that cannot be cut for so many ranks, too few GPUs, or a
    `torchrun` with another number of processes; no process is started then.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return None
    require_fit(read_config(path), size)
    require_devices(config)
    group = torchrun_group(size) if started_by_torchrun() else Team(size, WORKER)
    group.send(json.dumps(dataclasses.asdict(config)).encode())
    return group


def require_devices(config: EngineConfig) -> None:
    """Raise ValueError unless each rank of this host has its own GPU. Ranks can share a CPU, but
    their steps cannot be recorded there (`enforce_eager=False`)."""
    size = config.tensor_parallel_size
    if choose_device(config.device).type == "cuda":
        num_here = int(os.environ["LOCAL_WORLD_SIZE"]) if started_by_torchrun() else size
        num_gpus = torch.cuda.device_count()
        if num_here > num_gpus:
            raise ValueError(
                f"tensor_parallel_size={size} needs {num_here} GPUs on this machine, and PyTorch"
                f" sees {num_gpus}; lower it, or use device='cpu'"
            )
    elif config.enforce_eager is False:
        raise ValueError(
            f"enforce_eager=False: on a CPU the sums of tensor_parallel_size={size} cannot be"
            " recorded; leave enforce_eager out (nothing is lost)"
        )


@contextmanager
def closed_on_error(group: ProcessGroup | None) -> Iterator[None]:
    """Close the group if the body raises: its workers must not wait for an engine that failed."""
    try:
        yield
    except BaseException:
        if group is not None:
            group.close()
        raise


def agree(config: EngineConfig, group: ProcessGroup) -> EngineConfig:
    """Return the settings that suit all ranks: the number of KV blocks of the rank with the least
    memory, and requests no longer than those hold. Ranks with different numbers would read and
    write blocks that others do not have."""
    sizes = [known(config.num_kv_blocks), known(config.max_model_len)]
    num_kv_blocks, max_model_len = group.smallest(sizes)
    return replace(config, num_kv_blocks=num_kv_blocks, max_model_len=max_model_len)
