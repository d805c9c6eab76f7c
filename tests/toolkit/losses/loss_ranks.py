"""Processes of a process group, and what they compute of the loss."""

import multiprocessing
import pickle
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 90


def run_ranks(function: Any, size: int, folder: Path, *arguments: Any) -> list[Any]:
    """Return what `function(rank, *arguments)` returns on each rank of a group over gloo.

    Results come as bytes: torch would pass tensors by memory that dies with the process.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(
            target=_on_rank, args=(writer, function, rank, size, folder / "store", arguments)
        )
        for rank, (_, writer) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        return [_received(reader) for reader, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(reader: Connection) -> Any:
    if not reader.poll(TIMEOUT_S):
        raise TimeoutError(f"a rank said nothing for {TIMEOUT_S} s")
    result, error = pickle.loads(reader.recv_bytes())
    if error:
        raise RuntimeError(error)
    return result


def _on_rank(
    writer: Connection,
    function: Any,
    rank: int,
    size: int,
    store: Path,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    result, error = None, ""
    try:
        result = function(rank, *arguments)
        dist.barrier()  # the others may still need this process
    except Exception:
        error = traceback.format_exc()
    writer.send_bytes(pickle.dumps((result, error)))
