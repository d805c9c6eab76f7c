"""Schedule, checkpoints, metrics files, evaluation and comparison."""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_run import make_batches, make_student, make_teacher, tiny_config

from toolkit.config import OptimSection
from toolkit.errors import InputError
from toolkit.models.heads import head_of, load_head
from toolkit.training.checkpoint import Checkpoints, load_weights
from toolkit.training.compare import compare_runs
from toolkit.training.evaluate import evaluate
from toolkit.training.metrics import MetricsReader, MetricsWriter, read_steps
from toolkit.training.ranks import ALONE
from toolkit.training.schedule import learning_rate


def _rates(section: OptimSection, steps: int = 100) -> list[float]:
    return [learning_rate(step, steps, section) for step in range(steps)]


def test_cosine_warms_up_then_falls_to_its_minimum() -> None:
    rates = _rates(OptimSection(lr=1.0, warmup_steps=10, min_lr_ratio=0.1))
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[10 + 89 // 2] == pytest.approx(0.55, abs=0.02)


def test_wsd_is_stable_then_falls_linearly() -> None:
    section = OptimSection(lr=1.0, schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.0)
    rates = _rates(section)
    assert rates[:80] == [1.0] * 80
    assert rates[80:] == pytest.approx([(99 - step) / 20 for step in range(80, 100)])


def test_constant_and_single_step_runs() -> None:
    assert _rates(OptimSection(lr=2.0, schedule="constant")) == [2.0] * 100
    assert learning_rate(0, 1, OptimSection(lr=1.0)) == 1.0


def _parts(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_checkpoints_keep_the_newest_and_ignore_torn_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    model, optimizer = _parts(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, model, optimizer, {"tokens": step})
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000003"]
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000009")
    (tmp_path / "step-00000009" / "state.json").unlink()
    (tmp_path / ".step-00000004.abc").mkdir()
    newest = checkpoints.latest()
    assert newest is not None and newest.name == "step-00000003"
    checkpoints.save(3, model, optimizer, {"tokens": 33})
    assert checkpoints.load(newest, *_parts(tmp_path))["tokens"] == 33
    assert not list(tmp_path.glob(".step-*"))


def test_checkpoints_restore_model_and_optimizer(tmp_path: Path) -> None:
    model, optimizer = _parts(tmp_path)
    path = Checkpoints(tmp_path, keep=1).save(1, model, optimizer, {})
    other, other_optimizer = _parts(tmp_path)
    Checkpoints(tmp_path, keep=1).load(path, other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][name])
    weights = load_weights(path)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[n], t) for n, t in model.state_dict().items())


def test_metrics_reader_takes_whole_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "m" / "a.jsonl"
    reader = MetricsReader(path)
    assert reader.read() == []
    with MetricsWriter(path) as writer:
        writer.write("step", step=1)
        assert [r["step"] for r in reader.read()] == [1]
        with path.open("ab") as stream:
            stream.write(b'{"kind": "step", "st')
        assert reader.read() == []
    with MetricsWriter(path) as writer:  # the next process, after one that died in a line
        writer.write("step", step=2)
    assert [r["step"] for r in reader.read()] == [2]
    path.write_text('{"kind": "step", "step": 7}\n', encoding="utf-8")
    assert [r["step"] for r in reader.read()] == [7]


def test_steps_done_again_count_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with MetricsWriter(path) as writer:
        for step, loss in ((1, 0.5), (2, 0.4), (2, 0.3)):
            writer.write("step", step=step, loss=loss)
        writer.write("phase", phase="done")
    assert {s: r["loss"] for s, r in read_steps(path).items()} == {1: 0.5, 2: 0.3}


def test_evaluation_equals_full_logits(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "data.eval_rows=6")
    student = make_student(config)
    teacher, batches = make_teacher(config), make_batches(config, student)
    result = evaluate(student, teacher, batches.held_out(), ALONE)
    assert result is not None
    kd = ce = 0.0
    agreed = count = 0
    head, teacher_head = head_of(student.model), load_head(config.teacher)
    with torch.no_grad():
        for batch, states in teacher.stream(batches.held_out()):
            ours, theirs = head.logits(student.states(batch)), teacher_head.logits(states)
            log_q, log_p = ours.double().log_softmax(1), theirs.double().log_softmax(1)
            kd += float((log_p.exp() * (log_p - log_q)).sum())
            ce -= float(log_q.gather(1, batch.labels[:, None]).sum())
            agreed += int((ours.argmax(1) == theirs.argmax(1)).sum())
            count += batch.num_tokens
    assert result.num_tokens == count
    assert result.kd == pytest.approx(kd / count, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(ce / count), rel=1e-5)
    assert result.agreement == agreed / count
    assert student.training
    assert evaluate(student, teacher, batches.held_out(), ALONE, lambda: True) is None


def _fake_run(folder: Path, losses: list[float]) -> tuple[Path, Path]:
    folder.mkdir()
    with MetricsWriter(folder / "m.jsonl") as writer:
        for step, loss in enumerate(losses, 1):
            writer.write("step", step=step, loss=loss, kd=loss, ce=1.0)
    model, optimizer = _parts(folder)
    Checkpoints(folder / "c", keep=1).save(len(losses), model, optimizer, {})
    return folder / "m.jsonl", folder / "c"


def test_comparison_finds_the_largest_differences(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a_metrics, a_weights = _fake_run(tmp_path / "a", [1.0, 2.0, 3.0])
    torch.manual_seed(0)
    b_metrics, b_weights = _fake_run(tmp_path / "b", [1.0, 2.5, 3.1])
    result, pairs = compare_runs((a_metrics, b_metrics), (a_weights, b_weights))
    assert (result.loss, result.loss_step, result.weight) == (0.5, 2, 0.0)
    assert len(pairs) == 3 and result.within(0.5) and not result.within(0.4)
    c_metrics, c_weights = _fake_run(tmp_path / "c", [1.0, 2.0, 3.0])
    result, _ = compare_runs((a_metrics, c_metrics), (a_weights, c_weights))
    assert result.loss == 0.0 and result.weight > 0.0 and not result.within(0.0)


def test_comparison_refuses_what_cannot_be_compared(tmp_path: Path) -> None:
    a_metrics, a_weights = _fake_run(tmp_path / "a", [1.0, 2.0])
    b_metrics, b_weights = _fake_run(tmp_path / "b", [1.0])
    with pytest.raises(InputError, match=r"has 2 steps, .* has 1"):
        compare_runs((a_metrics, b_metrics), (a_weights, b_weights))
    shutil.rmtree(b_weights)
    with pytest.raises(InputError, match="has no checkpoint"):
        compare_runs((a_metrics, a_metrics), (a_weights, b_weights))


def test_metrics_are_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write("step", step=1, loss=0.25)
    record = json.loads((tmp_path / "m.jsonl").read_text())
    assert record["kind"] == "step" and record["loss"] == 0.25 and record["time"] > 1e9
