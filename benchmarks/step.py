"""What a disaggregated step costs against the slower side alone, and against a colocated step.

    python benchmarks/step.py [--quick] [--json FILE]

Each round runs the same configuration with the teacher in a process of its own and with the
teacher in the student's process, one after the other. One thread a process, so that two cores
suffice. Figures are medians over all steps but the first ones of all rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paths.root import ROOT
from rich.console import Console
from rich.table import Table

PLACEMENTS = ("disaggregated", "colocated")
WARMUP_STEPS = 3
SETTINGS = [
    "data.eval_rows=0",
    "data.sequence_length=128",
    "teacher.config.hidden_size=384",
    "teacher.config.intermediate_size=1024",
    "teacher.config.num_hidden_layers=4",
    "student.config.hidden_size=192",
    "student.config.intermediate_size=512",
    "student.config.num_hidden_layers=4",
    "loss.window_rows=1024",
    "loss.shard_columns=1024",
]


def run(folder: Path, placement: str, steps: int) -> None:
    """Run the tiny example, made heavier, in a run folder."""
    settings = [f"run.folder={folder}", f"run.steps={steps}", f"teacher.placement={placement}"]
    options = [part for item in settings + SETTINGS for part in ("--set", item)]
    subprocess.run(
        [sys.executable, "-m", "jobs", "run", str(ROOT / "examples" / "tiny.toml"), *options],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=600,
    )


def records(folder: Path, role: str, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind of a role of a run."""
    lines = (folder / "metrics" / f"{role}-0.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def measure(rounds: int, steps: int) -> dict[str, float]:
    """Return the figures of `rounds` interleaved rounds, in seconds and as ratios."""
    step_s: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
    student_s: list[float] = []
    teacher_s: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(rounds):
            for placement in PLACEMENTS:
                folder = Path(temporary) / f"{placement}-{number}"
                run(folder, placement, steps)
                done = records(folder, "student", "step")[WARMUP_STEPS:]
                step_s[placement] += [record["step_s"] for record in done]
                if placement == "disaggregated":
                    student_s += [record["step_s"] - record["wait_s"] for record in done]
                    served = records(folder, "teacher", "served")
                    batches = len(served) // steps
                    costs = [record["compute_s"] + record["write_s"] for record in served]
                    teacher_s += [
                        sum(costs[i : i + batches])
                        for i in range(WARMUP_STEPS * batches, len(costs), batches)
                    ]
    figures = {
        "disaggregated_step_s": statistics.median(step_s["disaggregated"]),
        "colocated_step_s": statistics.median(step_s["colocated"]),
        "student_alone_s": statistics.median(student_s),
        "teacher_alone_s": statistics.median(teacher_s),
    }
    slower = max(figures["student_alone_s"], figures["teacher_alone_s"])
    figures["step_over_slower_side"] = figures["disaggregated_step_s"] / slower
    figures["colocated_over_disaggregated"] = (
        figures["colocated_step_s"] / figures["disaggregated_step_s"]
    )
    return figures


def main() -> None:
    """Measure, print a table, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    figures = measure(rounds=1, steps=12) if options.quick else measure(rounds=3, steps=30)
    table = Table("figure", "median", title="cost of a step")
    for name, value in figures.items():
        table.add_row(name, f"{value * 1000:.1f} ms" if name.endswith("_s") else f"{value:.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
