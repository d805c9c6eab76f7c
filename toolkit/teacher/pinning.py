"""How the memory of hidden states is pinned for the device that reads it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from toolkit.errors import InputError
from transport.memory import Pin, lock


def pin_for(device: torch.device) -> Pin:
    """Return how a ring is pinned: registered with CUDA for a GPU, else locked."""
    return register_with_cuda if device.type == "cuda" else lock


@contextmanager
def register_with_cuda(address: int, num_bytes: int) -> Iterator[str]:
    """Let the GPU copy from this memory directly: a `Pin`.

    Raises:
        InputError: CUDA refuses it.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if status:
        raise InputError(
            f"CUDA cannot register the ring's {num_bytes} bytes: {torch.cuda.CudaError(status)}; "
            "raise the limit of locked memory (`ulimit -l unlimited`, under Slurm "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf), or lower ring.slots"
        )
    try:
        yield "registered with CUDA"
    finally:
        runtime.cudaHostUnregister(address)
