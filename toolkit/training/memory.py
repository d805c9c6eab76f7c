"""How much memory a process takes: GPU memory, or resident pages."""

from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


class PeakMemory:
    """The most memory in use since the last `reset`.

    On a GPU it is what torch has allocated, else the process's resident pages: libraries and the
    memory of a ring count among the latter.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with the peak so far."""
        self._device = device

    def reset(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(PermissionError):  # then loading the models may have been the peak
                _CLEAR.write_text(_FORGET_PEAK)

    def peak(self) -> int:
        """Return the peak in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
