"""Memory in huge pages: what is new in each call then costs far fewer faults and TLB misses."""

import ctypes
import mmap
from functools import cache

from torch import Tensor

_LEAST_BYTES = 2**22
"""In so much memory there is at least one whole huge page of x86."""


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Return the tensor, after Linux was advised so; nothing has touched its memory yet.

    Small tensors, GPUs and systems without huge pages are left as they are.
    """
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = tensor.data_ptr() + tensor.nbytes - first
    if tensor.device.type == "cpu" and count >= _LEAST_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(count), mmap.MADV_HUGEPAGE)
    return tensor


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
