"""The trainer: exact resumption, gradients that no split of the batch changes, clear ends."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import CPU, make_batches, make_student, make_teacher, tiny_config, train

from toolkit.data.tokens import write_tokens
from toolkit.training.compare import compare_runs
from toolkit.training.metrics import MetricsReader, read_steps
from toolkit.training.trainer import make_optimizer

STEPS = 5
SHORT = (f"run.steps={STEPS}", "data.eval_rows=0", "checkpoint.every_steps=2", "data.batch_size=2")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    train(tiny_config(folder, *SHORT))
    return folder


def _difference(first: Path, second: Path) -> tuple[float, float]:
    result, _ = compare_runs(
        (first / "metrics.jsonl", second / "metrics.jsonl"),
        (first / "checkpoints", second / "checkpoints"),
    )
    return result.loss, result.weight


@pytest.mark.parametrize("stop_at", range(STEPS))
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not_been(
    whole: Path, tmp_path: Path, stop_at: int
) -> None:
    config = tiny_config(tmp_path, *SHORT)
    first = train(config, should_stop=lambda step: step == stop_at)
    assert first.step == stop_at
    assert train(config).step == STEPS
    assert _difference(whole, tmp_path) == (0.0, 0.0)


def test_a_run_killed_after_a_checkpoint_does_the_lost_steps_again(
    whole: Path, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def kill(step: int) -> bool:
        if step == 4:
            raise Killed  # the checkpoint of step 2 is all that is left
        return False

    config = tiny_config(tmp_path, *SHORT)
    with pytest.raises(Killed):
        train(config, should_stop=kill)
    assert train(config).step == STEPS
    assert _difference(whole, tmp_path) == (0.0, 0.0)
    records = MetricsReader(tmp_path / "metrics.jsonl").read()
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert steps == [*(1, 2, 3), *(3, 4, 5)]


def test_dropout_is_resumed_too(tmp_path: Path) -> None:
    dropout = (*SHORT, "student.config.attention_dropout=0.5")
    torch.manual_seed(7)
    train(tiny_config(tmp_path / "whole", *dropout))
    torch.manual_seed(7)
    config = tiny_config(tmp_path / "cut", *dropout)
    train(config, should_stop=lambda step: step == 3)
    torch.manual_seed(99)
    train(config)
    assert _difference(tmp_path / "whole", tmp_path / "cut") == (0.0, 0.0)


def test_a_run_that_is_done_is_left_alone(whole: Path) -> None:
    before = sorted(p.stat().st_mtime_ns for p in (whole / "checkpoints").rglob("*"))
    assert train(tiny_config(whole, *SHORT)).step == STEPS
    assert sorted(p.stat().st_mtime_ns for p in (whole / "checkpoints").rglob("*")) == before


def test_accumulation_does_not_change_the_gradient(tmp_path: Path) -> None:
    """Rows of 20 and of 64 labelled tokens: a mean of means would weigh them wrongly."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 256, 64) for _ in range(8)]
    for row in rows[::2]:
        row[20:] = 256  # end-of-text tokens have no label
    tokens = tmp_path / "tokens.bin"
    write_tokens(tokens, [*rows, np.array([5])], vocab_size=257, eos_id=256)
    gradients = []
    for size, accumulation in ((8, 1), (1, 8)):
        config = tiny_config(
            tmp_path,
            f"data.tokens={tokens}",
            "data.eval_rows=0",
            f"data.batch_size={size}",
            f"optim.accumulation={accumulation}",
        )
        student = make_student(config)
        batches = make_batches(config, student).training(0, 1)
        counts = []
        for batch, states in make_teacher(config).stream(batches):
            student(batch, states).loss.backward()
            counts.append(batch.num_tokens)
        assert sum(counts) == 4 * 20 + 4 * 64
        gradients.append({n: p.grad for n, p in student.named_parameters()})
    for name, whole_batch in gradients[0].items():
        split = gradients[1][name]
        assert whole_batch is not None and split is not None
        assert (whole_batch - split).norm() <= 1e-6 * whole_batch.norm(), name


def test_every_step_is_recorded(whole: Path) -> None:
    steps = read_steps(whole / "metrics.jsonl")
    assert list(steps) == [1, 2, 3, 4, 5]
    last = steps[5]
    parts = ("teacher_s", "forward_s", "backward_s", "optimizer_s", "ranks_s")
    assert sum(last[part] for part in parts) == pytest.approx(last["step_s"])
    assert last["tokens"] == sum(record["step_tokens"] for record in steps.values())
    assert last["loss"] == pytest.approx(last["kd"], rel=1e-5)
    assert last["loss"] < steps[1]["loss"]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SHORT, "optim.lr=1e30", "optim.schedule=constant")
    with pytest.raises(FloatingPointError, match=r"step \d+: loss .*: lower optim\.lr"):
        train(config)


def test_only_matrices_decay() -> None:
    model = make_student(tiny_config(Path("unused"))).model
    matrices, vectors = make_optimizer(model, tiny_config(Path("unused")).optim).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in matrices["params"])
    assert all(p.ndim == 1 for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))
    assert next(model.parameters()).device == CPU


def test_checkpoints_carry_what_resuming_needs(whole: Path) -> None:
    newest = sorted((whole / "checkpoints").glob("step-*"))
    assert [path.name for path in newest] == ["step-00000004", "step-00000005"]
    state = json.loads((newest[-1] / "state.json").read_text())
    assert state["step"] == STEPS and state["tokens"] > 0 and "torch" in state
