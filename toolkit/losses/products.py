"""Sums of matrix products that are not rounded in between.

torch rounds a product of bfloat16 matrices to bfloat16. The MKL inside of torch's library for x86
can add one to a float32 sum instead, at the same speed.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_ROW_MAJOR, _NO_TRANS, _TRANS = 101, 111, 112  # CBLAS_LAYOUT and CBLAS_TRANSPOSE


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool = False) -> None:
    """Add `left @ right` to a total of the same dtype, or of a wider one; `first` replaces it."""
    if total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)
    elif _is_for_mkl(total, left, right):
        _add_with_mkl(total, left, right, 0.0 if first else 1.0)
    else:
        product = left @ right
        total.copy_(product) if first else total.add_(product)


def adds_unrounded(operand: Tensor) -> bool:
    """Say whether products of such matrices are added to wider sums without being made apart."""
    return operand.device.type == "cpu" and operand.dtype == torch.bfloat16 and _gemm() is not None


def _is_for_mkl(total: Tensor, left: Tensor, right: Tensor) -> bool:
    return (
        adds_unrounded(left)
        and (total.dtype, right.dtype) == (torch.float32, torch.bfloat16)
        and total.is_contiguous()
        and all(1 in matrix.stride() for matrix in (left, right))
        and min(*left.shape, *right.shape) > 0
    )


@cache
def _gemm() -> Any:
    """Return MKL's `cblas_gemm_bf16bf16f32`, or None where torch does not have it."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        gemm = ctypes.CDLL(str(library)).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        log.warning("products in bfloat16 are rounded before they are added up: torch has no MKL")
        return None
    gemm.restype = None
    return gemm


def _add_with_mkl(total: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Set a total `[M, N]` to factor times itself plus left `[M, K]` times right `[K, N]`."""
    (rows, inner), columns = left.shape, right.shape[1]
    assert total.shape == (rows, columns) and right.shape[0] == inner
    left_order, left_step = _layout(left)
    right_order, right_step = _layout(right)
    _gemm()(
        *(_ROW_MAJOR, left_order, right_order),
        *(rows, columns, inner),
        *(ctypes.c_float(1.0), ctypes.c_void_p(left.data_ptr()), left_step),
        *(ctypes.c_void_p(right.data_ptr()), right_step),
        *(ctypes.c_float(factor), ctypes.c_void_p(total.data_ptr()), columns),
    )


def _layout(matrix: Tensor) -> tuple[int, int]:
    """Return transposition and leading dimension; of a single row or column any will do."""
    if matrix.stride(1) == 1:
        return _NO_TRANS, max(matrix.stride(0), matrix.shape[1])
    return _TRANS, max(matrix.stride(1), matrix.shape[0])
