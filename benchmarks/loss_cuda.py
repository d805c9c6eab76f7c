"""The loss on a GPU: its kernels checked, their bandwidth, and its time against other ways.

    python benchmarks/loss_cuda.py [--quick] [--json FILE] [--no-checks]

Builds the CUDA library for this GPU if it is not there, runs the tests of the kernels (also under
compute-sanitizer, where it is installed), then measures in bfloat16 what `losses/ways.py` lists:
the four matrix products alone, which are the limit; full logits in eager mode and with
torch.compile; Liger's chunked loss, where it is installed; and this project's. Times are medians
from CUDA events, memory is the peak above the inputs.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from losses.ways import Sizes, make_inputs, ways

from toolkit.losses import rows
from toolkit.losses.backends import LIBRARIES, row_kernels
from toolkit.losses.divergences import Divergence, Objective
from toolkit.losses.rows import Tile

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/toolkit/losses/test_loss_native_cuda.py"


def build() -> None:
    """Compile the library for this GPU where the installation has not."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if LIBRARIES["cuda"].is_file():
        return
    if nvcc is None:
        raise SystemExit("there is neither the CUDA library nor nvcc")
    major, minor = torch.cuda.get_device_capability()
    options = ["-O3", "-std=c++17", f"-arch=sm_{major}{minor}", "-Xcompiler", "-fPIC"]
    options += ["-shared", "-cudart", "static"]
    source = ROOT / "toolkit/csrc/rows_cuda.cu"
    subprocess.run([nvcc, *options, source, "-o", LIBRARIES["cuda"]], check=True, timeout=300)


def check() -> None:
    """Run the tests of the kernels on the GPU, and the small ones under compute-sanitizer."""
    pytest = [sys.executable, "-m", "pytest", TESTS, "-m", "gpu", "--timeout=600"]
    subprocess.run(pytest, cwd=ROOT, check=True, timeout=600)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not installed")
        return
    few = ["-k", "tails"]
    command = [sanitizer, "--error-exitcode", "9", "--target-processes", "all", *pytest, *few]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)


def median_ms(run: Callable[[], object], rounds: int) -> float:
    """Return the median time between two CUDA events, after two runs to warm up."""
    times = []
    for _ in range(rounds + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])


def measure(run: Callable[[], object], rounds: int) -> tuple[float, float] | None:
    """Return the time in ms and the peak memory above what is there in MiB; None: too large."""
    try:
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        return median_ms(run, rounds), peak_mib
    except torch.cuda.OutOfMemoryError:
        return None


def bandwidths(divergence: Divergence, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Return the GB/s of logits that each kernel reads and writes, on tiles beyond the cache."""
    count, columns = 4096, 32768
    student, teacher = (torch.randn(count, columns, device="cuda", dtype=dtype) for _ in range(2))
    labels = torch.randint(0, columns, (count,), device="cuda")
    kernels, tile = row_kernels("native", "cuda"), Tile(student, teacher, 0)
    objective = Objective(divergence, 0.5, 1.0, 1e-3, 1e-3)
    state = rows.empty_state(count, student)
    kernels.statistics(tile, labels, objective, state)
    results = kernels.finish(state, objective)
    # Of the gradient only the first run sees the logits; the time does not depend on them.
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "statistics": (2, lambda: kernels.statistics(tile, labels, objective, state)),
        "sums": (2, lambda: kernels.sums(tile, objective, results)),
        "gradient": (3, lambda: kernels.gradient(tile, labels, objective, results)),
    }
    if not objective.needs_sums:
        del calls["sums"]
    tile_bytes = student.numel() * student.element_size()
    return {
        f"{divergence}.{name}.{dtype}_gb_per_s": tiles * tile_bytes / median_ms(call, rounds) / 1e6
        for name, (tiles, call) in calls.items()
    }


def main() -> None:
    """Build, check, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--no-checks", action="store_true", help="measure only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing is measured: this benchmark needs a CUDA device")
        return
    build()
    if not arguments.no_checks:
        check()
    rounds = 3 if arguments.quick else 10
    sizes = Sizes(2048, 1024, 2048, 32000) if arguments.quick else Sizes(8192, 2048, 4096, 128256)
    figures: dict[str, float] = {}
    inputs = make_inputs(sizes, torch.bfloat16, "cuda")
    divergences: tuple[Divergence, ...] = ("forward_kl", "jsd")
    for divergence in divergences:
        for dtype in (torch.bfloat16, torch.float32):
            figures |= bandwidths(divergence, dtype, rounds)
        for name, run in ways(inputs, divergence).items():
            if measured := measure(run, rounds):
                figures[f"{divergence}.{name}_ms"] = measured[0]
                figures[f"{divergence}.{name}_peak_mib"] = measured[1]
    print(torch.cuda.get_device_name(), torch.__version__, sizes)
    print("\n".join(f"{name:50} {value:12.2f}" for name, value in figures.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
