"""The choice of a backend for the row kernels."""

import logging
from functools import cache
from pathlib import Path
from typing import Literal

from toolkit.errors import InputError
from toolkit.losses import rows
from toolkit.losses.native import NativeKernels
from toolkit.losses.rows import RowKernels

Backend = Literal["auto", "torch", "native"]

LIBRARIES = {
    "cpu": Path(__file__).parents[1] / "libdisaggkd_rows.so",
    "cuda": Path(__file__).parents[1] / "libdisaggkd_rows_cuda.so",
}
"""Library of the native kernels for each type of device."""

REMEDIES = {
    "cpu": "install g++, then the package again",
    "cuda": "install nvcc, then the package again with DISAGGKD_CUDA=1",
}

log = logging.getLogger(__name__)


@cache
def row_kernels(backend: Backend, device_type: str) -> RowKernels:
    """Return the row kernels for a type of device, and log once which they are.

    Args:
        backend: `native`; `torch`; or `auto`, which is native where its library is built.
        device_type: `cpu`, `cuda` or another of torch's.

    Raises:
        InputError: `native` is asked for and its library is not there; the message has the remedy.
    """
    missing = _what_is_missing(device_type)
    if backend == "native" and missing:
        raise InputError(missing)
    if backend == "torch":
        log.info("row kernels of the loss on %s: torch, as chosen", device_type)
        return rows
    if missing:
        log.warning("row kernels of the loss on %s: torch, slower; %s", device_type, missing)
        return rows
    library = LIBRARIES[device_type]
    log.info("row kernels of the loss on %s: native, %s", device_type, library.name)
    return NativeKernels(library)


def _what_is_missing(device_type: str) -> str | None:
    if device_type not in LIBRARIES:
        return f"there are no native row kernels for {device_type}: use backend torch"
    library = LIBRARIES[device_type]
    if library.is_file():
        return None
    return f"{library.name} is not built: {REMEDIES[device_type]}"
