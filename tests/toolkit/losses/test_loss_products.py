"""Sums of matrix products."""

import itertools

import pytest
import torch

from toolkit.losses.products import _gemm, add_product

FP32, BF16 = torch.float32, torch.bfloat16
LAYOUTS = {
    "rows": lambda rows, columns: torch.randn(rows, columns),
    "columns": lambda rows, columns: torch.randn(columns, rows).t(),
    "part": lambda rows, columns: torch.randn(rows, columns + 3)[:, 1:-2],
    "part of columns": lambda rows, columns: torch.randn(columns + 3, rows + 2)[1:-2, 1:-1].t(),
    "steps": lambda rows, columns: torch.randn(rows, 2 * columns)[:, ::2],
}


@pytest.mark.parametrize(
    "sizes", [(7, 300, 5), (1, 9, 1), (1, 1, 8), (8, 1, 1), (0, 3, 4), (3, 0, 4)], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "wide"), [(BF16, FP32), (FP32, FP32), (BF16, BF16)], ids=["summed", "wide", "narrow"]
)
def test_product_is_added(dtype, wide, sizes):
    rows, inner, columns = sizes
    for left, right, first in itertools.product(LAYOUTS, LAYOUTS, (True, False)):
        a = LAYOUTS[left](rows, inner).to(dtype)
        b = LAYOUTS[right](inner, columns).to(dtype)
        total = torch.randn(rows, columns, dtype=wide)
        expected = a.double() @ b.double() + (0 if first else total.double())
        add_product(total, a, b, first=first)
        # Where there are steps in between, torch rounds the product.
        is_rounded = dtype is BF16 and ("steps" in (left, right) or _gemm() is None)
        tolerance = 2e-2 if wide is BF16 or is_rounded else 1e-5
        torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance * 30)


@pytest.mark.skipif(_gemm() is None, reason="this torch has no MKL")
def test_products_in_bfloat16_are_not_rounded():
    a, b = torch.randn(64, 4096).bfloat16(), torch.randn(4096, 48).bfloat16()
    exact = a.double() @ b.double()
    parts = torch.empty(64, 48)
    for start in range(0, 4096, 512):
        span = slice(start, start + 512)
        add_product(parts, a[:, span], b[span], first=start == 0)
    error, rounded = (float((x.double() - exact).norm() / exact.norm()) for x in (parts, a @ b))
    assert error < 1e-6 < 1e-3 < rounded


def test_sum_with_gaps_is_left_to_torch():
    total, a, b = torch.zeros(4, 10)[:, ::2], torch.randn(4, 6), torch.randn(6, 5)
    add_product(total, a.bfloat16(), b.bfloat16())
    torch.testing.assert_close(total, a @ b, rtol=5e-2, atol=5e-2)
