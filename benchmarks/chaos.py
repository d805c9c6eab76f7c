"""Whether a run loses anything when its teachers are killed, stopped, continued and replaced.

    python benchmarks/chaos.py [--quick] [--minutes N] [--seed N] [--json FILE]

The tiny example runs with three teachers. Every half second or so one of them is killed, stopped
or continued, or a new one is started. Then the same number of steps is run undisturbed, with the
teacher in the student's process, and the weights of both are compared bit for bit.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from paths.root import ROOT
from rich.console import Console
from rich.table import Table

from toolkit.training.checkpoint import load_weights
from toolkit.training.metrics import read_steps

NUM_TEACHERS = 3
PAUSE_S = (0.3, 0.9)
WAIT_S = 120.0
SETTINGS = [
    "data.eval_rows=0",
    "optim.schedule=constant",
    "checkpoint.every_steps=100000",
    "ring.spare_slots=8",
    "transport.heartbeat_s=0.2",
    "transport.dead_after_s=1.0",
    "transport.order_timeout_s=5.0",
]


class Run:
    """A run of the tiny example."""

    def __init__(self, folder: Path, steps: int, *settings: str) -> None:
        self.folder = folder
        self.metrics = folder / "metrics" / "student-0.jsonl"
        settings = (f"run.folder={folder}", f"run.steps={steps}", *SETTINGS, *settings)
        options = [part for item in settings for part in ("--set", item)]
        tiny = str(ROOT / "examples" / "tiny.toml")
        self._output = (folder.parent / f"{folder.name}.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jobs", "run", tiny, *options],
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def num_steps(self) -> int:
        """Return how many steps are done."""
        return max(read_steps(self.metrics), default=0) if self.metrics.exists() else 0

    def end(self, *codes: int) -> None:
        """Wait for the end, which must be as expected."""
        code = self.process.wait(WAIT_S)
        self._output.seek(0)
        if code not in codes:
            raise SystemExit(f"the run ended with {code}:\n{self._output.read()}")
        self._output.close()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the student's weights after the last step."""
        return load_weights(max((self.folder / "checkpoints").glob("step-*")))


class Teachers:
    """The teachers of a run, and what is done to them."""

    def __init__(self, run: Run, rng: random.Random) -> None:
        self._run = run
        self._rng = rng
        self._next_rank = NUM_TEACHERS
        self._started: list[subprocess.Popen[bytes]] = []
        self.counts: Counter[str] = Counter()

    def disturb(self) -> None:
        """Do one thing to one teacher."""
        alive = self._alive()
        stopped = [p for p in alive if p.status() == psutil.STATUS_STOPPED]
        running = [p for p in alive if p not in stopped]
        actions = {
            "continue": [p.resume for p in stopped],
            "stop": [p.suspend for p in running] if len(running) > 1 else [],
            "kill": [p.kill for p in alive] if len(alive) > 1 else [],
            "start": [self._start] if len(alive) < NUM_TEACHERS else [],
        }
        name = self._rng.choice([name for name, calls in actions.items() if calls])
        self._rng.choice(actions[name])()
        self.counts[name] += 1

    def close(self) -> None:
        """End the teachers that were started here, and let the others end themselves."""
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):
                process.resume()
        for teacher in self._started:
            teacher.terminate()
            with suppress(subprocess.TimeoutExpired):
                teacher.wait(1.0)
            teacher.kill()
            teacher.wait()

    def _start(self) -> None:
        command = [sys.executable, "-m", "jobs", "role", "teacher", "--run", str(self._run.folder)]
        log = self._run.folder / "logs" / f"teacher-{self._next_rank}.log"
        with log.open("w") as stream:
            teacher = subprocess.Popen(
                [*command, "--rank", str(self._next_rank), "--parent", str(os.getpid())],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self._started.append(teacher)
        self._next_rank += 1

    def _alive(self) -> list[psutil.Process]:
        for teacher in self._started:
            teacher.poll()  # a dead one that is not reaped would seem to live
        children = psutil.Process(self._run.process.pid).children()
        children += [psutil.Process(t.pid) for t in self._started if t.returncode is None]
        return [
            child
            for child in children
            if child.status() != psutil.STATUS_ZOMBIE and "teacher" in child.cmdline()
        ]


def disturbed_run(
    folder: Path, seed: int, minutes: float, at_least: int
) -> tuple[Run, Counter[str]]:
    """Run with teachers that come and go, for this time and this many disturbances."""
    run = Run(folder, 10**6, f"teacher.replicas={NUM_TEACHERS}")
    teachers = Teachers(run, random.Random(seed))
    try:
        deadline = time.monotonic() + WAIT_S
        while run.num_steps() < 5:
            if run.process.poll() is not None or time.monotonic() > deadline:
                run.process.terminate()
                run.end()
            time.sleep(0.1)
        rng, end = random.Random(seed + 1), time.monotonic() + 60 * minutes
        while run.process.poll() is None and (
            time.monotonic() < end or teachers.counts.total() < at_least
        ):
            time.sleep(rng.uniform(*PAUSE_S))
            teachers.disturb()
        run.process.send_signal(signal.SIGINT)
    finally:
        teachers.close()
    run.end(130)
    return run, teachers.counts


def measure(minutes: float, at_least: int, seed: int) -> dict[str, Any]:
    """Return what was done to the run and what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        run, counts = disturbed_run(Path(folder) / "disturbed", seed, minutes, at_least)
        steps = run.num_steps()
        whole = Run(Path(folder) / "whole", steps, "teacher.placement=colocated")
        whole.end(0)
        ours, theirs = run.weights(), whole.weights()
        waits = [record["wait_s"] for record in read_steps(run.metrics).values()]
    return {
        "seed": seed,
        "disturbances": counts.total(),
        **{f"num_{name}": counts[name] for name in ("kill", "stop", "continue", "start")},
        "steps": steps,
        "longest_wait_s": max(waits),
        "bitwise_equal": all(torch.equal(ours[name], theirs[name]) for name in theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten disturbances")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    minutes, at_least = (0.0, 10) if arguments.quick else (arguments.minutes, 50)
    figures = measure(minutes, at_least, arguments.seed)
    table = Table("", "", title="teachers killed, stopped, continued, started")
    for name, value in figures.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    sys.exit(not figures["bitwise_equal"])


if __name__ == "__main__":
    main()
