"""The loss on a CPU against the matrix products alone, full logits and Liger's chunked loss.

    python benchmarks/loss.py [--quick] [--json FILE] [--svg FILE] [--case NAME ...]

Each way has a process of its own; all take turns, once a round. Times are CPU times, as medians
over the rounds of the ratio to the matrix products of the same round. Memory is the peak above
inputs and gradients. Errors are of the gradients of the first tokens, by norm, against float64.
Liger's loss is measured where liger-kernel is installed (`make bench` does that).
"""

import argparse
import ctypes
import json
import select
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from losses.ways import WAYS, Inputs, Sizes, Way, full_logits, make_inputs, ways
from rich.console import Console
from rich.table import Table

from toolkit.losses.divergences import Divergence

TIMEOUT_S = 600
ERROR_TOKENS = 64
LIMIT = "gemm"


class Case(NamedTuple):
    """What is measured."""

    sizes: Sizes
    dtype: str
    divergences: tuple[Divergence, ...] = ("forward_kl", "jsd")
    budget_mib: int = 1024  # of our loss; the default


CASES = {
    "fp32_32k": Case(Sizes(1024, 512, 1024, 32_000), "float32", get_args(Divergence)),
    "bf16_32k": Case(Sizes(4096, 1024, 2048, 32_000), "bfloat16", budget_mib=240),
    "bf16_152k": Case(Sizes(512, 896, 2048, 151_936), "bfloat16"),
    "bf16_248k": Case(Sizes(2048, 512, 512, 248_320), "bfloat16", budget_mib=1280),
}
QUICK = {"quick": Case(Sizes(256, 128, 256, 8_000), "float32")}
CURVE = {
    f"curve_{tokens}": Case(Sizes(tokens, 512, 1024, 32_000), "float32", ("jsd",), 512)
    for tokens in (256, 512, 1024, 2048, 4096)
}


class Measured(NamedTuple):
    """One run."""

    wall_s: float
    cpu_s: float


def work(case: Case, divergence: Divergence, name: str) -> None:
    """Do what comes in by standard input, a word a line, and answer each in JSON."""
    inputs = make_inputs(case.sizes, getattr(torch, case.dtype), "cpu")
    way = ways(inputs, divergence, case.budget_mib)[name]
    answers = {
        "run": lambda: _run(inputs, way),
        "peak": lambda: _peak(inputs, way),
        "error": lambda: _error(inputs, divergence, name),
    }
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def _run(inputs: Inputs, way: Way) -> Measured:
    """Measure the second of two runs: in a training loop no other process came in between."""
    way()
    inputs.clear()
    start = time.perf_counter(), time.process_time()
    way()
    return Measured(time.perf_counter() - start[0], time.process_time() - start[1])


def _peak(inputs: Inputs, way: Way) -> int:
    """Return the most bytes in memory above what is there before, less the gradients."""
    inputs.clear()
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    way()
    gradients = (inputs.student_hidden.grad, inputs.student_weight.grad)
    return _resident("VmHWM") - before - sum(part.nbytes for part in gradients if part is not None)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _error(inputs: Inputs, divergence: Divergence, name: str) -> float:
    """Return the larger error of the gradients of hidden states and head."""
    exact = inputs.first(ERROR_TOKENS, torch.float64)
    full_logits(exact, divergence).backward()  # type: ignore[no-untyped-call]
    part = inputs.first(ERROR_TOKENS, inputs.student_hidden.dtype)
    ways(part, divergence)[name]()
    return max(
        float((got.grad.double() - want.grad).norm() / want.grad.norm())
        for got, want in zip(part[:2], exact[:2], strict=True)
        if got.grad is not None and want.grad is not None
    )


class Worker:
    """The process of one way."""

    def __init__(self, case: str, divergence: Divergence, name: str) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", case, divergence, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, word: str) -> Any:
        """Return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            raise TimeoutError(f"no answer to {word!r} within {TIMEOUT_S} s")
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> "Worker":
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT_S)


def measure(
    name: str, divergence: Divergence, rounds: int, chosen: list[str] | None
) -> dict[str, float]:
    """Return the figures of one divergence of a case, of all ways or of some."""
    known = ways(make_inputs(Sizes(1, 1, 1, 2), torch.float32, "cpu"), divergence)
    names = [way for way in known if chosen is None or way in (LIMIT, *chosen)]
    with ExitStack() as stack:
        workers = {way: stack.enter_context(Worker(name, divergence, way)) for way in names}
        for worker in workers.values():  # one after the other: they warm up and compile
            worker.ask("run")
        peaks = {way: worker.ask("peak") for way, worker in workers.items()}
        turns = [{way: Measured(*workers[way].ask("run")) for way in names} for _ in range(rounds)]
        errors = {way: workers[way].ask("error") for way in names if way != LIMIT}
    figures = {}
    for way in names:
        key = f"{_prefix(name, divergence)}.{way}"
        figures[f"{key}_cpu_s"] = statistics.median(turn[way].cpu_s for turn in turns)
        figures[f"{key}_wall_s"] = statistics.median(turn[way].wall_s for turn in turns)
        figures[f"{key}_peak_mib"] = peaks[way] / 2**20
        if way != LIMIT:
            ratios = [turn[way].cpu_s / turn[LIMIT].cpu_s for turn in turns]
            figures[f"{key}_vs_gemm"] = statistics.median(ratios)
            figures[f"{key}_error"] = errors[way]
    _show(name, divergence, names, figures)
    return figures


def _prefix(name: str, divergence: Divergence) -> str:
    return name if divergence == "forward_kl" else f"{name}.{divergence}"


def _show(name: str, divergence: Divergence, names: list[str], figures: dict[str, float]) -> None:
    case = ALL[name]
    sizes = "T {}, Hs {}, Ht {}, V {}".format(*case.sizes)
    table = Table(title=f"{name}: {divergence} + CE, {case.dtype}, {sizes}")
    columns = ("way", "CPU / products", "CPU s", "wall s", "peak MiB", "gradient error")
    keys = ("vs_gemm", "cpu_s", "wall_s", "peak_mib", "error")
    for column in columns:
        table.add_column(column, justify="left" if column == "way" else "right")
    for way in names:
        values = [figures.get(f"{_prefix(name, divergence)}.{way}_{key}") for key in keys]
        table.add_row(way, *("" if value is None else f"{value:.3g}" for value in values))
    Console(width=110).print(table)


def write_svg(figures: dict[str, float], path: Path) -> None:
    """Draw time and memory against the number of tokens."""
    import matplotlib.pyplot as plot

    plot.rcParams["svg.fonttype"] = "none"
    figure, axes = plot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    titles = {"cpu_s": "CPU time [s]", "peak_mib": "peak above inputs and gradients [MiB]"}
    names = list(
        dict.fromkeys(
            key.split(".")[2].removesuffix("_cpu_s") for key in figures if key.endswith("cpu_s")
        )
    )
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for way in dict.fromkeys(names):
            points = [
                (ALL[case].sizes.tokens, figures[f"{case}.jsd.{way}_{key}"])
                for case in CURVE
                if f"{case}.jsd.{way}_{key}" in figures
            ]
            axis.plot(*zip(*points, strict=True), marker="o", label=way)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.minorticks_off()
        axis.set_xticks([ALL[case].sizes.tokens for case in CURVE], minor=False)
        axis.set_xticklabels([str(ALL[case].sizes.tokens) for case in CURVE])
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


ALL = CASES | QUICK | CURVE


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small case, few rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--svg", type=Path, help="draw time and memory against the tokens")
    parser.add_argument("--case", nargs="+", choices=list(ALL), help="only these")
    parser.add_argument("--divergence", nargs="+", choices=get_args(Divergence), help="only these")
    parser.add_argument("--way", nargs="+", choices=WAYS, help="only these, and the products")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        case, divergence, way = arguments.worker
        work(ALL[case], divergence, way)
        return
    rounds = 3 if arguments.quick else arguments.rounds
    chosen = arguments.case or (QUICK if arguments.quick else CURVE if arguments.svg else CASES)
    figures: dict[str, float] = {}
    for name in chosen:
        for divergence in arguments.divergence or ALL[name].divergences:
            figures |= measure(name, divergence, rounds, arguments.way)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if arguments.svg:
        write_svg(figures, arguments.svg)


if __name__ == "__main__":
    main()
