"""The native row kernels on the CPU: what the torch kernels say, in bits that never change."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import DIVERGENCES
from row_cases import compute, equal_bits, errors, make_rows

from toolkit.errors import InputError
from toolkit.losses import backends, rows
from toolkit.losses.backends import row_kernels
from toolkit.losses.options import LossOptions

KERNELS = row_kernels("native", "cpu")
DTYPES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6}
"""How far sums may be from the torch kernels in float64."""
GRADIENT = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3}

each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_agrees(case):
    dtype = case.student.dtype
    found = errors(compute(KERNELS, case), compute(rows, case.in_float64()))
    assert found.pop("gradient") < GRADIENT[dtype]
    assert max(found.values()) < DTYPES[dtype], found


@each_dtype
@each_divergence
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_agrees_with_torch_in_float64(divergence, dtype, temperature):
    assert_agrees(make_rows(divergence, dtypes=(dtype, dtype), temperature=temperature))


@each_divergence
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 5003), (2, 2048), (9, 4099)], ids=str)
def test_odd_sizes(divergence, shape):
    if shape[1] > 1:
        assert_agrees(make_rows(divergence, shape))
        return
    window = compute(KERNELS, make_rows(divergence, shape, z_factor=0.0))
    assert not window.results.sums.any()
    assert not window.results.ce.any()
    assert not window.gradient.any()


@each_dtype
@pytest.mark.parametrize("teacher", DTYPES, ids=str)
def test_dtypes_may_differ(dtype, teacher):
    case = make_rows("jsd", dtypes=(dtype, teacher), cuts=(17,), softcap=None)
    assert_agrees(case)


@pytest.mark.parametrize("terms", [{"ce_factor": 0.0}, {"z_factor": 0.0}, {"kd_factor": 0.0}])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_terms_alone(terms, temperature):
    case = make_rows("forward_kl", temperature=temperature, softcap=None, **terms)
    assert_agrees(replace(case, weights=None))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(DIVERGENCES), st.sets(st.integers(1, 5002)))
def test_any_cut_into_tiles_says_the_same(divergence, cuts):
    assert_agrees(make_rows(divergence, (2, 5003), cuts=sorted(cuts), temperature=0.7))


@each_divergence
@pytest.mark.parametrize("columns", [slice(0, 5), slice(2048, 4096)], ids=["few", "a chunk"])
def test_tokens_the_teacher_excludes(divergence, columns):
    case = make_rows(divergence, (3, 5003))
    case.teacher[:, columns] = -torch.inf
    if divergence in ("reverse_kl", "symmetric_kl"):
        window = compute(KERNELS, case)
        assert (window.results.sums[:, 0] == torch.inf).all()
        return
    expected = compute(rows, case.in_float64())
    found = errors(compute(KERNELS, case), expected)
    del found["state"]  # its reverse cross term is infinite
    assert max(found.values()) < 2e-6


@each_divergence
def test_chunk_that_neither_model_gives_any_weight(divergence):
    case = make_rows(divergence, (3, 5003))
    case.student[:, 2048:4096] = -1e4
    case.teacher[:, 2048:4096] = -torch.inf
    found = errors(compute(KERNELS, case), compute(rows, case.in_float64()))
    assert found["ce"] < 2e-6
    if divergence not in ("reverse_kl", "symmetric_kl"):
        assert found["gradient"] < 2e-6


@each_divergence
def test_tokens_that_both_models_exclude(divergence):
    case = make_rows(divergence, (3, 5003), softcap=None)
    excluded = torch.full((3, 100), -torch.inf)
    wider = {name: torch.cat([getattr(case, name), excluded], 1) for name in ("student", "teacher")}
    expected, found = compute(KERNELS, case), compute(KERNELS, replace(case, **wider))
    torch.testing.assert_close(found.results.sums, expected.results.sums)
    torch.testing.assert_close(found.gradient[:, :5003], expected.gradient)
    assert not found.gradient[:, 5003:].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@each_divergence
def test_logits_that_are_not_numbers_are_not_hidden(divergence, value):
    case = make_rows(divergence)
    case.student[1, 500] = value
    window = compute(KERNELS, case)
    assert window.results.ce[1].isnan()
    assert window.results.sums[1, 0].isnan()
    assert window.gradient[1].isnan().any()
    assert window.gradient[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@each_divergence
def test_logits_of_a_teacher_that_are_not_numbers_are_not_hidden(divergence, value):
    case = make_rows(divergence)
    case.teacher[1, 500] = value
    window = compute(KERNELS, case)
    assert window.results.sums[1, 0].isnan()
    if divergence != "total_variation":  # its slope is a sign
        assert window.gradient[1].isnan().any()
    assert window.gradient[[0, 2, 3, 4]].isfinite().all()


@each_dtype
@each_divergence
def test_same_bits_again_and_with_any_number_of_threads(divergence, dtype):
    case = make_rows(divergence, (3, 9001), (dtype, dtype), cuts=(100, 5000), temperature=0.7)
    threads = torch.get_num_threads()
    try:
        windows = []
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            windows.append(compute(KERNELS, case))
    finally:
        torch.set_num_threads(threads)
    assert all(equal_bits(windows[0], window) for window in windows[1:])


def test_rows_that_are_not_adjacent_numbers_are_refused():
    case = make_rows("jsd")
    turned = replace(case, student=case.student.t().contiguous().t())
    with pytest.raises(AssertionError, match="adjacent"):
        compute(KERNELS, turned)


def test_choice_of_a_backend(caplog, monkeypatch, tmp_path):
    monkeypatch.setitem(backends.LIBRARIES, "cpu", tmp_path / "libdisaggkd_rows.so")
    row_kernels.cache_clear()
    caplog.set_level("INFO")
    try:
        with pytest.raises(InputError, match=r"libdisaggkd_rows\.so is not built: install g\+\+"):
            row_kernels("native", "cpu")
        with pytest.raises(InputError, match="no native row kernels for meta: use backend torch"):
            row_kernels("native", "meta")
        assert [row_kernels("auto", "cpu") for _ in range(2)] == [rows, rows]
        assert row_kernels("torch", "cpu") is rows
    finally:
        row_kernels.cache_clear()
    slower, chosen = caplog.records  # once each
    assert (slower.levelname, chosen.levelname) == ("WARNING", "INFO")
    assert "torch, slower; libdisaggkd_rows.so is not built: install g++" in slower.message
    with pytest.raises(InputError, match="backend = 'numpy': choose one of auto, torch, native"):
        LossOptions("jsd", backend="numpy")
