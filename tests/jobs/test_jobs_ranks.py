"""Several student ranks: DDP over gloo, each with a ring of its own."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from command_line import ROOT, CommandLine, wait_for

from toolkit.training.metrics import read_steps
from transport.rendezvous import RunKeys

RANKS = ("student.replicas=3", "data.batch_size=1")
QUICK = ("transport.heartbeat_s=0.2", "transport.dead_after_s=3.0", "transport.grace_s=3.0")


def _steps_done(folder: Path) -> int:
    return len(read_steps(folder / "metrics" / "student-0.jsonl"))


def test_ranks_compute_what_one_rank_accumulates(disaggkd: CommandLine) -> None:
    disaggkd.run("ranks", *RANKS, "optim.accumulation=2", steps=4)
    disaggkd.run(
        "one", "data.batch_size=1", "optim.accumulation=6", "teacher.placement=colocated", steps=4
    )
    output = disaggkd(
        "compare", disaggkd.folder / "ranks", disaggkd.folder / "one", "--tolerance", "1e-5"
    )
    assert "4 steps" in output
    results = [
        json.loads((disaggkd.folder / name / "result.json").read_text())["before"]
        for name in ("ranks", "one")
    ]
    assert results[0]["num_tokens"] == results[1]["num_tokens"]
    assert abs(results[0]["kd"] - results[1]["kd"]) < 1e-7


def test_interrupted_ranks_go_on_bit_for_bit(disaggkd: CommandLine) -> None:
    """Three ranks: the order in which their gradients are added shows in the bits."""
    settings = (*RANKS, *QUICK, "teacher.placement=colocated", "data.eval_rows=0")
    folder = disaggkd.folder / "cut"
    process = disaggkd.start(*disaggkd.run_arguments("cut", *settings, steps=24))
    wait_for(lambda: _steps_done(folder) >= 3, what="the third step")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert 3 <= _steps_done(folder) < 24
    disaggkd.run("cut", *settings, steps=24)
    disaggkd.run("whole", *settings, steps=24)
    disaggkd("compare", folder, disaggkd.folder / "whole", "--tolerance", "0")


def test_a_killed_rank_ends_the_run_with_a_clear_error(disaggkd: CommandLine) -> None:
    settings = ("student.replicas=2", "data.eval_rows=0", *QUICK)
    folder = disaggkd.folder / "run"
    process = disaggkd.start(*disaggkd.run_arguments("run", *settings, steps=2000))
    wait_for(lambda: _steps_done(folder) >= 3, what="the third step")
    victim = next(p for p in disaggkd.children() if "--rank 1" in " ".join(p.cmdline()))
    victim.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "student 1 was ended by SIGKILL" in output
    assert "Traceback" not in output
    assert json.loads((folder / "failed").read_text())["again"]
    log = (folder / "logs" / "student-0.log").read_text()
    assert "another rank of the student is lost" in log
    saved = max(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == f"step-{_steps_done(folder):08d}"  # by the first rank alone


JOIN_AND_LEAVE = """
import sys
from pathlib import Path
import torch
from toolkit.training.ranks import Ranks, joined
ranks = Ranks(int(sys.argv[1]), 2, torch.device("cpu"))
torch.set_num_threads(1)
for turn in range(100):
    with joined(ranks, Path(sys.argv[2]) / str(turn), "lo", 30.0):
        replica = ranks.replicate(torch.nn.Linear(4, 4))
        replica(torch.ones(1, 4)).sum().backward()
        ranks.sum(1.0)
        ranks.wait()
    del replica  # after the group was left, as where a run returns
"""


def test_leaving_the_other_ranks_never_hangs(tmp_path: Path) -> None:
    """A group that ended with its last DDP module hung about once in a hundred times."""
    for turn in range(100):
        folder = tmp_path / str(turn)
        folder.mkdir(mode=0o700)
        RunKeys.create(folder)
    command = [sys.executable, "-c", JOIN_AND_LEAVE]
    ranks = [subprocess.Popen([*command, str(rank), tmp_path], cwd=ROOT) for rank in range(2)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
