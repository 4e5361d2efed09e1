"""The processes that share one model: started by torchrun, each with some of the heads of every layer."""

import atexit
import os
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from kvbench.errors import SettingsConflict, check_whole

if TYPE_CHECKING:
    from kvbench.models.devices import Devices


def started() -> tuple[int, int]:
    """Rank of this process and number of processes, as set by torchrun; (0, 1) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def connect() -> None:
    """Makes the connections between the processes, once: by gloo in main memory, by NCCL (RCCL) between GPUs.

    A process of several takes the GPU of its own number.
    """
    if torch.distributed.is_initialized():
        return
    if started()[0] == 0:
        atexit.register(tell, ("end",))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # The first process may be busy for hours (with graders, or data) before it has something to send.
    kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(kind, timeout=timedelta(days=7))


def tell(what: tuple[Any, ...]) -> None:
    """Tells the other processes what comes next; for the first one."""
    torch.distributed.broadcast_object_list([what], src=0, device=torch.device("cpu"))


def hear() -> tuple[Any, ...]:
    """Receives the next message of the first process."""
    received: list[Any] = [None]
    torch.distributed.broadcast_object_list(received, src=0, device=torch.device("cpu"))
    message: tuple[Any, ...] = received[0]
    return message


def read_processes(value: object, model_kind: str, devices: "Devices") -> int:
    """Number of processes of a validated `model.tensor_parallel`; None is one.

    Refuses it, with the remedy, where as many were not started, or the model cannot be split.
    """
    if value is None or value == 1:
        return 1
    wanted = check_whole("model.tensor_parallel", value, 1, ", or null for one process")
    if model_kind not in ("hf", "embedded"):
        raise SettingsConflict(
            f"model.tensor_parallel={wanted} is for models that are read from a folder or the hub (model.kind=hf), and "
            f"model.kind={model_kind} is put together in one process; set model.tensor_parallel=null",
            setting="model.tensor_parallel",
        )
    if len(devices.all) > 1:
        raise SettingsConflict(
            f"model.tensor_parallel={wanted} cuts each layer over processes with a device each, and "
            f"model.device={devices} spreads whole layers; set one of the two",
            setting="model.tensor_parallel",
        )
    _, there = started()
    if there != wanted:
        raise SettingsConflict(
            f"model.tensor_parallel={wanted}, but {there} process{'es were' if there > 1 else ' was'} started; give "
            f"the command as torchrun --nproc-per-node={wanted} -m kvbench ...",
            setting="model.tensor_parallel",
        )
    connect()
    return wanted


def parallel_arguments(processes: int) -> dict[str, Any]:
    """Arguments that make `from_pretrained` cut a model over the processes by its own plan."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return {"tp_plan": "auto"}
    if "tp_size" not in {field.name for field in fields(DistributedConfig)}:
        return {"tp_plan": "auto"}  # versions whose configuration is about experts alone
    return {"distributed_config": DistributedConfig(tp_size=processes)}


def too_few_heads(name: str, kv_heads: int, processes: int) -> str | None:
    """The reason why a model's heads cannot be divided among so many processes; None where they can."""
    if kv_heads % processes == 0:
        return None
    fitting = max(count for count in range(1, processes) if kv_heads % count == 0)
    instead = f"{fitting} processes" if fitting > 1 else "one process"
    return (
        f"{name}: {kv_heads} KV heads cannot be divided among {processes} processes, each of which holds whole ones; "
        f"use {instead}, or spread the layers (model.device=[cuda:0,cuda:1])"
    )
