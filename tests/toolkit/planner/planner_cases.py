"""Jobs and tables of the planner's tests."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.planner.coefficients import Coefficients
from toolkit.planner.facts import read_model
from toolkit.planner.hardware import GPUS, Network
from toolkit.planner.job import Job

TORCH_WINDOWS = Coefficients(window_bytes=14, own_traffic=0)
"""Of the tables: windows of torch operations, three buffers in float32 and one in bfloat16; the
student's own traffic is not counted."""


def make_job(teacher: str = "Qwen3.5-35B-A3B", student: str = "Qwen3.5-9B", **changes: Any) -> Job:
    """Return the job of the tables, with one node each."""
    job = Job(
        student=read_model(student),
        teacher=read_model(teacher),
        gpu=GPUS["h100-80"],
        network=Network(8, 400),
        student_gpus=8,
        teacher_gpus=8,
        window_rows=1024,
        shard_columns=2**30,
        coefficients=TORCH_WINDOWS,
    )
    return replace(job, **changes)


def make_pair(text: str, **changes: Any) -> Job:
    """Return the job of a pair such as `Qwen3-32B -> Qwen3-8B`."""
    teacher, student = (name.strip() for name in text.split("->"))
    return make_job(teacher, student, **changes)


def table(name: str) -> list[list[str]]:
    """Return the rows of a table, without its heads; T2 has the GPU in front."""
    text = (Path(__file__).parent / "tables.md").read_text(encoding="utf-8")
    rows = []
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, *lines = part.splitlines()
        if not title.startswith(name):
            continue
        cells = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in lines
            if line.startswith("|")
        ]
        front = [match[1].lower()] if (match := re.search(r" on (\S+) \(", title)) else []
        rows += [front + row for row in cells[2:]]
    assert rows, name
    return rows
