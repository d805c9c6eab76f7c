"""How fast hidden states travel: the ring against memcpy, ucx_perftest, gloo and ZeroMQ.

    python benchmarks/transport.py [--quick] [--json FILE]

Needs two cores: writer and reader are pinned to one each. Every round measures everything once, one
after the other, so that a disturbance meets all of it; figures are medians over the rounds, and a
ratio is the median of the ratios of each round. The processes live through all rounds.

Streams of the ring are loops in C (`paths/loop.c`) that make the same writes and waits as the
package, since memcpy and `ucx_perftest` are loops in C too. The rows with `_python` have loops in
Python over the package's own classes: what a caller in Python gets. A ring has four slots, used in
turn; the rows with `_1_slot` use one, as `ucx_perftest` uses one buffer.

Streams run in two variants. "plain": the source is not rewritten and the slot is not read, as
`ucx_perftest` and memcpy have it; the keys without a suffix. "written and read": the source is
written before each message and every word of the slot read and checked, as a training run has it;
the keys with `_written_read`. Ratios to memcpy and `ucx_perftest` are of the plain variant, those
to gloo of both.

posix, cma and tcp are UCX transports. The kind of memory counts. UCX allocates shared memory, which
has small pages: a ring in production, `ucx_perftest` by default. So the limit of posix is memcpy
into shared memory, over as many buffers; `_vs_memcpy_ordinary` is to ordinary memory, which may
have huge pages. Payloads into shared memory take cma where it is allowed; that is "cma", for the
ring and for `ucx_perftest`. "cma_ordinary" has ordinary memory on both sides, which no other
process can store into, the bell included.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import paths.root  # noqa: F401  (before transport)
from paths.paths import MEMCPY, PATHS, STREAMS, UCX_SETTINGS, VARIANTS, Figures, Paths
from paths.side import SLOTS
from rich.console import Console
from rich.table import Table

SIZES_MIB = (1, 16, 64)
QUICK_SIZES_MIB = (1, 16)
RATIOS = {
    "posix_16mib_vs_memcpy": ("posix_16mib", f"memcpy_{SLOTS}_shared_16mib"),
    "posix_16mib_vs_memcpy_ordinary": ("posix_16mib", f"memcpy_{SLOTS}_buffers_16mib"),
    **{
        f"{path}{slots}_{size}mib_vs_perftest": (
            f"{path}{slots}_{size}mib",
            f"perftest_{path}_{size}mib",
        )
        for path in UCX_SETTINGS
        for slots in ("", "_1_slot")
        for size in SIZES_MIB
    },
    **{
        f"tcp_{size}mib{variant}_vs_gloo": (f"tcp_{size}mib{variant}", f"gloo_{size}mib{variant}")
        for size in SIZES_MIB
        for variant in VARIANTS
    },
}
TARGETS = {
    "posix_16mib_vs_memcpy": 0.95,
    "posix_1mib_vs_perftest": 0.9,
    "cma_16mib_vs_perftest": 1.0,
    "tcp_16mib_vs_perftest": 0.95,
    "tcp_1mib_vs_gloo": 1.0,
    "tcp_16mib_vs_gloo": 1.0,
}


def measure_round(paths: Paths, sizes_mib: tuple[int, ...]) -> Figures:
    """Measure everything once."""
    figures: Figures = {}
    for size in sizes_mib:
        figures |= paths.copies(size)
        for kind in STREAMS:
            figures |= paths.streams(kind, size)
        figures |= paths.perftests(size)
    for path in PATHS:
        figures |= paths.round_trip(path)
    figures |= paths.progress_cost()
    return figures | {
        name: figures[ours] / figures[other]
        for name, (ours, other) in RATIOS.items()
        if ours in figures
    }


def measure(num_rounds: int, sizes_mib: tuple[int, ...], duration_s: float) -> list[Figures]:
    """Return the figures of each round; the first, which only warms up, is left out."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"needs two cores, this process may use {cores}")
    with tempfile.TemporaryDirectory() as temporary:
        paths = Paths((cores[0], cores[1]), sizes_mib, duration_s, Path(temporary))
        with paths.connected():
            return [measure_round(paths, sizes_mib) for _ in range(num_rounds + 1)][1:]


def tables(rounds: list[Figures]) -> Iterator[Table]:
    """Yield what is printed."""
    figures = medians(rounds)
    table = Table("GiB/s", *(f"{size} MiB" for size in SIZES_MIB), title="plain / written and read")
    for path in (*MEMCPY, *(f"perftest_{path}" for path in UCX_SETTINGS), *STREAMS):
        cells = []
        for size in SIZES_MIB:
            names = [f"{path}_{size}mib{variant}" for variant in VARIANTS]
            cells.append(" / ".join(f"{figures[name]:.1f}" for name in names if name in figures))
        table.add_row(path, *cells)
    yield table
    table = Table("ratio", "median", "lowest", "highest", "target", title="ratios of one round")
    for name in (name for name in RATIOS if name in figures):
        values = [figures[name], *(pick(one[name] for one in rounds) for pick in (min, max))]
        target = f"{TARGETS[name]:.2f}" if name in TARGETS else ""
        table.add_row(name, *(f"{value:.2f}" for value in values), target)
    yield table
    table = Table("path", "round trip, 64 B", "writer's CPU", "reader's CPU")
    for path in PATHS:
        cpu = (figures[f"{path}_16mib_{side}_cpu_s_per_gib"] for side in ("writer", "reader"))
        cells = [f"{value:.3f} s/GiB" for value in cpu]
        table.add_row(path, f"{figures[f'{path}_round_trip_us']:.0f} us", *cells)
    yield table
    table = Table("progress thread, over tcp", "share of a busy main thread's core")
    for state in ("idle", "receiving"):
        table.add_row(state, f"{figures[f'progress_{state}_share']:.1%}")
    yield table


def medians(rounds: list[Figures]) -> Figures:
    """Return the median of every figure."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> None:
    """Measure, print tables, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    rounds = measure(1, QUICK_SIZES_MIB, 0.05) if options.quick else measure(5, SIZES_MIB, 0.3)
    for table in tables(rounds):
        Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(medians(rounds), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
