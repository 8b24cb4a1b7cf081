"""Several ranks as one learner: which rank this is, rendezvous, and bytes from rank 0 to the others.

Invariant: only rank 0 reads streams and channels; what the others need reaches them as bytes over
torch.distributed (uint8 tensors, never pickled objects), and every wait ends at a deadline. Held by
tests/e2e/test_learner_engine.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from datetime import timedelta
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from anabranch.schemas.errors import ConfigError

RENDEZVOUS_FILE = "ANABRANCH_RENDEZVOUS_FILE"  # set by `launch.launch_ranks` for its children


def init_ranks(rank: int, world_size: int, *, device: str, deadline_s: float) -> None:
    """Join the process group of the learner's ranks; a no-op if this process is in one of the same size.

    One rank needs no network at all. Ranks started by `launch_ranks` meet through a private file and talk over
    loopback; ranks started by the deepspeed or torchrun launcher meet at MASTER_ADDR:MASTER_PORT.

    Raises:
        ConfigError: this process is in a process group of another size, or nobody says where the ranks meet.
    """
    os.environ.setdefault("LOCAL_RANK", str(rank))  # DeepSpeed reads it
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ConfigError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()}, not {rank} of {world_size}"
            )
        return
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=deadline_s)
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    elif RENDEZVOUS_FILE in os.environ:
        store = dist.FileStore(os.environ[RENDEZVOUS_FILE], world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        if lacking := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
            raise ConfigError(
                f"rank {rank} of {world_size} does not know where the ranks meet: {' and '.join(lacking)} not set. Start the "
                "ranks with the deepspeed or torchrun launcher, or unset RANK and WORLD_SIZE to have them started here"
            )
        dist.init_process_group(backend, init_method="env://", rank=rank, world_size=world_size, timeout=timeout)


def leave_ranks(exit_code: int) -> NoReturn:
    """End this process, one of several ranks, with `exit_code` and without Python's finalization.

    Some of torch's and DeepSpeed's threads are still there when the interpreter and the C++ statics under them are taken
    apart: about one rank in a hundred died of it ("terminate called without an active exception", exit code 134) with all
    of its work done. What has to be closed must be closed before; standard streams are flushed here.
    """
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)


def broadcast_bytes(data: bytes | None) -> bytes:
    """`data` of rank 0, on every rank (the others pass None). Collective; ends at the process group's deadline."""
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
    dist.broadcast(size, src=0)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if data:
        buffer.copy_(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))
    dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


def send_bytes(data: bytes, rank: int) -> None:
    """`data` to `rank`, which calls `receive_bytes`; from rank 0. Ends at the process group's deadline."""
    dist.send(torch.tensor([len(data)], dtype=torch.int64), dst=rank)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=rank)


def receive_bytes() -> bytes:
    """What rank 0 sends to this rank. Ends at the process group's deadline."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, src=0)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(buffer, src=0)
    return buffer.numpy().tobytes()


def gather_vectors(own: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """The float64 vectors of all ranks, one after the other, and where in it `own` [n] lies. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own, slice(0, len(own))
    sizes = [torch.empty(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=own.device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=own.dtype, device=own.device)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    start = sum(int(size) for size in sizes[: dist.get_rank()])
    whole = torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
    return whole, slice(start, start + len(own))


def rank_from_environment() -> tuple[int, int] | None:
    """(rank, world size) if a launcher (`launch_ranks`, deepspeed, torchrun) started this process, else None.

    Raises:
        ConfigError: RANK or WORLD_SIZE is not a number, or only one of them is set.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return None
    try:
        return int(rank or ""), int(world_size or "")
    except ValueError:
        raise ConfigError(f"RANK={rank} and WORLD_SIZE={world_size} do not name a rank") from None
