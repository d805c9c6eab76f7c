"""A run whose teachers are killed, stopped, continued and replaced; a transport at full speed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _figures(tmp_path: Path, name: str) -> dict[str, Any]:
    """Run a benchmark's quick form; return its figures."""
    path = tmp_path / "figures.json"
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def test_a_disturbed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "chaos")
    assert figures["disturbances"] >= 10 and figures["bitwise_equal"], figures


def test_nothing_grows(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "soak")
    assert figures["num_orders"] > 1000
    for side in ("student", "teacher"):
        assert figures[f"{side}_growth_mib"] < 4, figures
        assert figures[f"{side}_new_fds"] == figures[f"{side}_new_threads"] == 0, figures
