"""How much memory a process takes: GPU memory, or resident pages."""

import ctypes
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


class PeakMemory:
    """The most memory in use since the last `reset`, in bytes, and of it by moment of a step.

    On a GPU it is what torch has allocated, else the process's resident pages: libraries and the
    memory of a ring count among the latter.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with the peak so far."""
        self._device = device
        self.moments: dict[str, int] = {}
        """The peak of each moment that has ended since the last `reset`."""

    def reset(self) -> None:
        """Forget the peaks so far."""
        self.moments.clear()
        self._forget()

    def lap(self, moment: str) -> None:
        """Count the peak since the last lap to a moment; the allocator gives back what is free."""
        self.moments[moment] = max(self._newest(), self.moments.get(moment, 0))
        if self._device.type != "cuda":
            with suppress(AttributeError):  # only glibc has it
                ctypes.CDLL(None).malloc_trim(0)
        self._forget()

    def peak(self) -> int:
        """Return the peak."""
        return max(self._newest(), *self.moments.values(), 0)

    def now(self) -> int:
        """Return what is in use."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _of_process("VmRSS")

    def outside(self) -> dict[str, int]:
        """Return what a GPU has given to torch, and besides; nothing without one."""
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return {"reserved_bytes": reserved, "context_bytes": total - free - reserved}

    def _forget(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(PermissionError):  # then loading the models may have been the peak
                _CLEAR.write_text(_FORGET_PEAK)

    def _newest(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _of_process("VmHWM")


def _of_process(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
