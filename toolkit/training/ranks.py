"""Data-parallel students: how the ranks of one training run find each other and agree.

A single student is a group of one, without a process group.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from transport.errors import PeerLostError
from transport.rendezvous import interface_address, publish, wait_for

_STORE = "students"

_groups: list[dist.ProcessGroup] = []
"""Keeps process groups alive until the process ends: DDP would drop the last reference to one with
the GIL held, and wait for a thread of the group that may want the GIL (torch 2.13)."""


@dataclass(frozen=True)
class Ranks:
    """This process among the student's ranks.

    Attributes:
        rank: which one this is.
        size: how many there are.
        device: where this rank computes.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Return the sums of numbers over all ranks, the same on each (float64)."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return [float(value) for value in total]

    def share(self, text: str) -> str:
        """Return the first rank's text on every rank."""
        texts = [text]
        if self.size > 1:
            dist.broadcast_object_list(texts, src=0)
        return texts[0]

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def replicate(self, module: nn.Module) -> nn.Module:
        """Return the module such that its backward averages gradients over all ranks."""
        if self.size == 1:
            return module
        with warnings.catch_warnings():  # the argument has a new name from torch 2.13 on
            warnings.filterwarnings("ignore", category=FutureWarning)
            return DistributedDataParallel(module, broadcast_buffers=False)

    @contextmanager
    def averaging(self, module: nn.Module, last: bool) -> Iterator[None]:
        """Average gradients over the ranks in the last backward of a step alone."""
        if isinstance(module, DistributedDataParallel) and not last:
            with module.no_sync():
                yield
        else:
            yield


ALONE = Ranks(0, 1, torch.device("cpu"))
"""A student that is trained by one process on the CPU."""


@contextmanager
def joined(ranks: Ranks, folder: Path, interface: str, timeout_s: float) -> Iterator[None]:
    """Join the ranks of a run, for the time of a `with` block.

    The first rank listens on a port that the system chooses and publishes it in the run folder.

    An error of a collective is taken for the loss of another rank, which it nearly always is.

    Args:
        ranks: this rank among the others.
        folder: run folder.
        interface: network interface on which the ranks reach each other.
        timeout_s: limit of joining, and of every collective after it.

    Raises:
        PeerLostError: another rank is gone.
    """
    if ranks.size == 1:
        yield
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)
    timeout = timedelta(seconds=timeout_s)
    if ranks.is_first:
        host, port = interface_address(interface), 0
    else:
        host, _, text = wait_for(folder, _STORE, timeout_s).removeprefix("tcp://").rpartition(":")
        port = int(text)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=ranks.is_first, timeout=timeout, wait_for_workers=False
    )
    if ranks.is_first:
        publish(folder, _STORE, f"tcp://{host}:{store.port}")
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout
    )
    if dist.group.WORLD is not None:
        _groups.append(dist.group.WORLD)
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        raise PeerLostError(f"another rank of the student is lost: {error}") from error
    finally:
        dist.destroy_process_group()
