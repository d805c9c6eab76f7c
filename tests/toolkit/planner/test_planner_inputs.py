"""What the planner is given by its user: coefficients, hardware, sizes, configurations of runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from planner_cases import make_job

from toolkit.config import LossSection
from toolkit.config_file import load_config
from toolkit.errors import InputError
from toolkit.losses.divergences import Divergence, Objective
from toolkit.planner.coefficients import Coefficients, documented, read_coefficients
from toolkit.planner.hardware import GIB, Gpu, Network, find_gpu, find_network
from toolkit.planner.job import Job
from toolkit.planner.measured import calibrated, compare, measure, merged
from toolkit.planner.memory import fused_plan, student_memory
from toolkit.planner.run import job_of_run, layout_of
from toolkit.planner.traffic import head_passes

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny.toml"


def test_coefficients_are_read_and_overridden(tmp_path: Path) -> None:
    file = tmp_path / "coefficients.toml"
    file.write_text("student_mfu = 0.5\nnccl_gib = 2\n")
    read = read_coefficients(file, ["nccl_gib=3"])
    assert read == replace(Coefficients(), student_mfu=0.5, nccl_gib=3.0)
    assert {item.tag for item in documented()} == {"measured", "estimate", "choice"}


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("", "mfu=1", "there is no coefficient 'mfu'"),
        ("", "student_mfu=fast", "student_mfu = 'fast' must be a number"),
        ("", "student_mfu", "student_mfu = '' must be a number"),
        ("student_mfu = -1", "nccl_gib=1", "student_mfu = -1 must be a number of 0 or more"),
        ("student_mfu =", "nccl_gib=1", "is not TOML"),
    ],
)
def test_wrong_coefficients_are_refused(
    tmp_path: Path, text: str, override: str, message: str
) -> None:
    file = tmp_path / "coefficients.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_coefficients(file, [override])


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the coefficients"):
        read_coefficients(tmp_path / "none", [])
    with pytest.raises(InputError, match="cannot read the hardware table"):
        find_gpu("h100-80", tmp_path / "none")


def test_users_describe_their_own_gpus(tmp_path: Path) -> None:
    table = tmp_path / "hardware.toml"
    table.write_text("[gpu.mi300x]\nmemory_gib = 191\npeak_tflops = 1307\n")
    assert find_gpu("mi300x", table) == Gpu("mi300x", 191, 1307)
    assert find_gpu("h100-80", table).usable_bytes(Coefficients()) / GIB == pytest.approx(
        73.0, abs=0.05
    )
    with pytest.raises(InputError, match=r"no GPU 'tpu': choose one of .*\[gpu.tpu\]"):
        find_gpu("tpu", table)
    table.write_text("[gpu.mi300x]\nmemory_gib = 191\n")
    with pytest.raises(InputError, match=r"\[gpu.mi300x\] needs the numbers memory_gib, peak"):
        find_gpu("mi300x", table)


@pytest.mark.parametrize("text", ["8x400", "1x100tcp", "2x12.5"])
def test_networks_are_read_as_they_are_written(text: str) -> None:
    assert str(find_network(text)) == text


def test_networks_have_names(tmp_path: Path) -> None:
    assert find_network("infiniband-ndr") == find_network("8x400")
    assert find_network("ethernet-100") == find_network("1x100tcp")
    table = tmp_path / "hardware.toml"
    table.write_text("[network.ours]\nports = 4\ngigabits = 200\nis_rdma = true\n")
    assert find_network("ours", table) == find_network("4x200")
    table.write_text("[network.ours]\nports = 4\n")
    with pytest.raises(InputError, match=r"\[network.ours\] needs the numbers ports, gigabits"):
        find_network("ours", table)


@pytest.mark.parametrize("text", ["400", "8x", "0x400", "8x0", "8x400udp", ""])
def test_wrong_networks_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not of the form 8x400"):
        find_network(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens = 0 must be at least 1"),
        ({"sharding": "zero4"}, "sharding = 'zero4': choose one of ddp"),
        ({"tensor_parallel": 3}, "student_gpus = 8 is no multiple of 3"),
        ({"expert_parallel": 3}, "expert_parallel = 3 does not divide the 8"),
        ({"trained_share": 1.5}, r"trained_share = 1.5 must lie in \(0, 1\]"),
        ({"student_bytes": 3}, "student_bytes = 3 must be 2 or 4"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_job(**changes)


def run_job(*overrides: str, gpu: Gpu | None = None) -> Job:
    config = load_config(EXAMPLE, overrides)
    return job_of_run(config, gpu, Network(8, 400), Coefficients())


def test_run_is_planned_as_the_trainer_works() -> None:
    job = run_job("optim.accumulation=1")
    assert (job.sharding, job.student_bytes, job.teacher_bytes) == ("ddp", 4, 4)
    assert not job.keeps_gradients and run_job().keeps_gradients
    assert job.trained_share == pytest.approx(63 / 64)
    assert layout_of(load_config(EXAMPLE)) == "disaggregated"
    memory = student_memory(job, "disaggregated")
    assert memory.static["optimizer"] == 2 * memory.static["weights"]
    gpu = student_memory(replace(job, gpu=find_gpu("h100-80")), "disaggregated")
    slot = 4 * 64 * 96 * 4
    assert gpu.static["hidden states"] == slot
    assert memory.static["hidden states"] > 6 * slot


@pytest.mark.parametrize("strategy", ["windows", "recompute"])
def test_loss_is_planned_as_it_is_asked_for(strategy: Any) -> None:
    config = load_config(EXAMPLE).model_copy(update={"loss": LossSection(strategy=strategy)})
    job = job_of_run(config, None, Network(8, 400), Coefficients())
    assert fused_plan(job)[0].strategy == strategy


@pytest.mark.parametrize("divergence", get_args(Divergence))
@pytest.mark.parametrize("strategy", ["windows", "recompute"])
def test_logits_are_computed_as_often_as_the_loss_does(strategy: Any, divergence: Any) -> None:
    config = load_config(EXAMPLE)
    loss = LossSection(strategy=strategy, divergence=divergence)
    job = job_of_run(
        config.model_copy(update={"loss": loss}), None, Network(8, 400), Coefficients()
    )
    objective = Objective(divergence, 0.5, 1.0, 1.0, 0.0)
    assert head_passes(job) == (1 if strategy == "windows" else 2 + objective.needs_sums)


def student_records(steps: int, step_s: float, wait_s: float) -> list[dict[str, Any]]:
    record = {"step_tokens": 504, "num_bytes": 504 * 384, "peak_bytes": 5e8}
    return [record | {"step_s": step_s, "wait_s": wait_s} for _ in range(steps)]


def teacher_records(count: int, compute_s: float) -> list[dict[str, Any]]:
    return [{"compute_s": compute_s, "write_s": 0.01} for _ in range(count)]


MEMORY: dict[str, Any] = {
    "held": {"weights": 1e8, "gradients": 1e8, "optimizer": 2e8, "teacher head": 1e7},
    "moments": {"loss": 9e8, "backward": 8e8, "optimizer": 6e8},
    "between_steps": 5e8,
}


def test_a_run_that_waits_for_its_teacher_is_recognized() -> None:
    job = run_job()  # two micro-batches a step
    measured = measure([student_records(10, 0.4, 0.2)], MEMORY, teacher_records(20, 0.19), job)
    assert measured.waiting_share == pytest.approx(0.5)
    found = {item.name: item for item in compare(job, "disaggregated", measured)}
    step = found["step, from the run's rates"]
    assert (step.planned, step.measured) == (pytest.approx(0.4), pytest.approx(0.4))
    token = found["hidden states a token"]
    assert (token.planned, token.measured) == (384, 384)


def test_memory_is_compared_by_component() -> None:
    job = run_job()  # its gradients accumulate
    measured = measure([student_records(9, 0.5, 0.0)], MEMORY, teacher_records(9, 0.1), job)
    assert measured.other_bytes == pytest.approx(5e8 - 3.1e8)
    assert measured.moments == {"loss": 4e8, "backward": 3e8, "optimizer": 1e8}
    found = {item.name: item for item in compare(job, "disaggregated", measured)}
    memory = student_memory(job, "disaggregated")
    assert found["gradients"].planned == memory.static["gradients"]
    assert found["at backward"].planned == pytest.approx(
        memory.static["gradients"] + memory.moments["backward"]
    )
    assert found["other memory"].planned == job.coefficients.process_gib * GIB
    colocated = MEMORY | {"held": MEMORY["held"] | {"teacher weights": 5e7}}
    measured = measure([student_records(9, 0.5, 0.0)], colocated, [], job)
    assert measured.held["teacher weights"] == 6e7 and "teacher head" not in measured.held


def test_calibrated_plan_repeats_the_run() -> None:
    job = run_job()
    measured = measure([student_records(10, 0.5, 0.0)], MEMORY, teacher_records(20, 0.1), job)
    values = calibrated(job, "disaggregated", measured, knows_network=False)
    assert not {"work_layer", "rdma_efficiency", "context_gib"} & values.keys()
    again = replace(job, coefficients=replace(Coefficients(), optimizer_bytes=0, **values))
    found = {item.name: item for item in compare(again, "disaggregated", measured)}
    for name in ("tokens/s", "other memory"):
        assert found[name].planned == pytest.approx(found[name].measured, rel=0.02)
    assert merged([{"a": 1.0}, {"a": 3.0, "b": 5.0}, {"a": 2.0}]) == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize("gpus", [1, 2])
def test_gpu_and_network_are_calibrated(gpus: int) -> None:
    job = run_job(f"student.replicas={gpus}", gpu=find_gpu("h100-80"))
    job = replace(job, network=Network(1, 0.01, is_rdma=False))
    memory = MEMORY | {"reserved_bytes": 9.9e8, "context_bytes": 1.5 * GIB}
    records = [student_records(10, 0.5, 0.0)] * gpus
    measured = measure(records, memory, teacher_records(9 * 18 * gpus, 0.1), job)
    values = calibrated(job, "disaggregated", measured, knows_network=True)
    assert values["fragmentation"] == pytest.approx(0.1)
    assert (values.get("context_gib"), values.get("nccl_gib")) == (
        (1.5, None) if gpus == 1 else (None, pytest.approx(0.8))
    )
    assert values["tcp_efficiency"] == pytest.approx(504 * 384 / 0.18 / 1.25e6)
    assert "process_gib" not in values


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_work_inside_of_a_layer_is_calibrated(share: float) -> None:
    job = replace(run_job("optim.accumulation=1"), tokens=1 << 20)
    planned = replace(job, coefficients=replace(job.coefficients, work_layer=share))
    backward = student_memory(planned, "disaggregated").moments["backward"]
    memory = MEMORY | {"moments": MEMORY["moments"] | {"backward": 5e8 + backward}}
    measured = measure([student_records(9, 0.5, 0.0)], memory, [], job)
    values = calibrated(job, "disaggregated", measured, knows_network=False)
    assert values["work_layer"] == pytest.approx(share)


def test_older_runs_have_no_memory() -> None:
    records = [{"step_s": 1.0, "wait_s": 0.0} for _ in range(9)]
    with pytest.raises(InputError, match="an older version made it"):
        measure([records], None, [], run_job())


def test_too_short_a_run_says_nothing() -> None:
    with pytest.raises(InputError, match="fewer than 4 steps"):
        measure([student_records(3, 0.5, 0.0)], MEMORY, [], run_job())
