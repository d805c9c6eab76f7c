"""The CUDA row kernels: on a GPU where there is one, and without it all that can be known."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loss_cases import DIVERGENCES
from row_cases import RowCase, compute, equal_bits, errors, make_rows

from toolkit.losses import rows
from toolkit.losses.backends import LIBRARIES
from toolkit.losses.native import NativeError, NativeKernels

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "toolkit" / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
DTYPES = {torch.float64: (1e-13, 1e-13), torch.float32: (2e-6, 2e-6), torch.bfloat16: (2e-6, 4e-3)}
"""Bounds of the sums and of the gradient, against the torch kernels in float64."""

each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
built = pytest.mark.skipif(
    not LIBRARIES["cuda"].is_file(), reason="the CUDA library is not built: there is no nvcc"
)


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run: on the CPU, in the order of the GPU's threads, or on a GPU."""
    if request.param == "cuda" and not (LIBRARIES["cuda"].is_file() and torch.cuda.is_available()):
        pytest.skip("needs a CUDA device and the CUDA library")
    return "cpu" if request.param == "host" else "cuda"


@pytest.fixture(scope="module")
def kernels(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeKernels]:
    if device == "cuda":
        yield NativeKernels(LIBRARIES["cuda"])
        return
    library = tmp_path_factory.mktemp("rows") / "rows_block_test.so"
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    source = Path(__file__).with_name("rows_block_test.cpp")
    subprocess.run(["g++", *flags, "-I", SOURCES, source, "-o", library], check=True, timeout=60)
    yield NativeKernels(library)


def assert_agrees(kernels: NativeKernels, device: str, case: RowCase) -> None:
    sums_bound, gradient_bound = DTYPES[case.student.dtype]
    found = errors(compute(kernels, case.to(device)), compute(rows, case.in_float64().to(device)))
    assert found.pop("gradient") < gradient_bound
    assert max(found.values()) < sums_bound, found


@each_dtype
@each_divergence
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_agrees_with_torch_in_float64(kernels, device, divergence, dtype, temperature):
    case = make_rows(divergence, (3, 9001), (dtype, dtype), (4500,), temperature=temperature)
    assert_agrees(kernels, device, case)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 4096), (2, 4097), (5, 1003), (9, 130)], ids=str)
def test_whole_chunks_and_tails(kernels, device, dtype, shape):
    assert_agrees(kernels, device, make_rows("jsd", shape, (dtype, torch.bfloat16)))


@each_divergence
def test_tokens_the_teacher_excludes(kernels, device, divergence):
    case = make_rows(divergence, (3, 9001))
    case.teacher[:, 4096:8192] = -torch.inf
    window = compute(kernels, case.to(device))
    if divergence in ("reverse_kl", "symmetric_kl"):
        assert (window.results.sums[:, 0] == torch.inf).all()
        return
    found = errors(window, compute(rows, case.in_float64().to(device)))
    del found["state"]  # its reverse cross term is infinite
    assert max(found.values()) < 2e-6


@each_divergence
def test_equal_logits_have_exactly_no_divergence(kernels, device, divergence):
    case = make_rows(divergence, (3, 9001), temperature=0.7, ce_factor=0.0, z_factor=0.0)
    case.teacher.copy_(case.student)
    window = compute(kernels, case.to(device))
    assert not window.results.sums.any()
    assert not window.gradient.any()


@each_divergence
def test_same_bits_again(kernels, device, divergence):
    case = make_rows(divergence, (3, 9001)).to(device)
    assert equal_bits(compute(kernels, case), compute(kernels, case))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_logits_than_32_bits_can_count():
    rows_, columns = 2**15, 2**16 + 8
    logits = torch.zeros(rows_, columns, dtype=torch.bfloat16, device="cuda")
    logits[-1] = torch.randn(columns, device="cuda")
    case = make_rows("forward_kl", (1, columns), (torch.bfloat16, torch.bfloat16))
    big = RowCase(
        logits, logits.clone(), case.labels.cuda().expand(rows_).contiguous(), case.objective
    )
    last = RowCase(logits[-1:], logits[-1:], case.labels.cuda(), case.objective)
    kernels = NativeKernels(LIBRARIES["cuda"])
    whole, part = compute(kernels, big), compute(kernels, last)
    assert torch.equal(whole.state[-1:], part.state)
    assert torch.equal(whole.gradient[-1:], part.gradient)


@built
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_driver_says_why():
    kernels = NativeKernels(LIBRARIES["cuda"])
    state = rows.empty_state(3, torch.zeros(3, 4))
    with pytest.raises(
        NativeError, match=r"rows_finish of libdisaggkd_rows_cuda\.so failed: .*CUDA"
    ):
        kernels.finish(state, make_rows("jsd").objective)


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_kernels_keep_everything_in_registers(tmp_path):
    command = [NVCC, "-O3", "-std=c++17", "-arch=sm_90", "-cubin", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, SOURCES / "rows_cuda.cu", "-o", tmp_path / "rows.cubin"],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", done.stderr)
    assert len(frames) == 2 * (1 + 1 + 1 + 4 + 1 + 7)  # kernels, in float and double
    assert set(frames) == {("0", "0", "0")}
