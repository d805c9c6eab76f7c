"""The commands `plan` and `calibrate`, and what `run` and `submit` say of the plan."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import TINY, CommandLine, takes_less
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from toolkit.planner.facts import bundled
from toolkit.planner.memory import LAYOUTS

HEADLINE = ("--teacher", "Qwen3.5-35B-A3B", "--student", "Qwen3.5-9B")


def plan_json(disaggkd: CommandLine, *arguments: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(disaggkd("plan", *arguments, "--json"))
    return found


def test_layouts_are_compared(disaggkd: CommandLine) -> None:
    output = disaggkd("plan", *HEADLINE, "--nodes-student", "7")
    assert "Qwen3.5-35B-A3B teaches Qwen3.5-9B: 56 + 8 x h100-80" in " ".join(output.split())
    assert "Colocated with the fused loss is the better plan" in " ".join(output.split())
    found = json.loads(disaggkd("plan", *HEADLINE, "--nodes-student", "7", "--json"))
    for layout in LAYOUTS:
        plan = found[layout]
        assert plan["peak_gib"] == pytest.approx(
            sum(plan["static_gib"].values()) + plan["moments_gib"][plan["moment"]]
        )
        assert {"fits", "max_tokens", "tokens_per_s", "bound"} <= plan.keys()
    assert found["teachers"]["replica_gpus"] == 1
    assert f"up to {found['teachers']['break_even_tokens']:,.0f} tokens" in " ".join(output.split())
    assert found["verdict"].startswith("Colocated")


@pytest.mark.alone
def test_plan_takes_less_than_a_second_and_no_torch() -> None:
    code = (
        "import sys; from jobs.cli import app; sys.argv = ['disaggkd', 'plan', *sys.argv[1:]]\n"
        "try: app()\n"
        "finally: print({'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )

    def plan() -> None:
        done = subprocess.run(
            [sys.executable, "-c", code, *HEADLINE], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and done.stderr.strip() == "set()", done.stderr

    takes_less(1.0, plan)


def test_models_are_read_from_files(disaggkd: CommandLine, tmp_path: Path) -> None:
    for name, model in (("teacher", "Qwen3-8B"), ("student", "Qwen3-0.6B")):
        (tmp_path / name).mkdir()
        config = json.dumps(bundled()[model]["config"])
        (tmp_path / name / "config.json").write_text(config)
    of_files = plan_json(
        disaggkd, "--teacher", str(tmp_path / "teacher"), "--student", str(tmp_path / "student")
    )
    of_names = plan_json(disaggkd, "--teacher", "Qwen3-8B", "--student", "Qwen3-0.6B")
    assert of_files["disaggregated"] == of_names["disaggregated"]


def test_sweep_and_picture(disaggkd: CommandLine, tmp_path: Path) -> None:
    output = disaggkd("plan", *HEADLINE, "--sweep", "nodes=1..2")
    assert "does not fit: 77.9" in output.replace("\n", " ") and "8 + 2" in output
    picture = tmp_path / "plan.svg"
    disaggkd("plan", *HEADLINE, "--svg", str(picture))
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a configuration, or --teacher and --student"),
        (("--teacher", "Qwen9", "--student", "Qwen3-8B"), "'Qwen9' is neither a model folder"),
        ((*HEADLINE, "--gpu", "tpu"), "there is no GPU 'tpu'"),
        ((*HEADLINE, "--network", "fast"), "network = 'fast' is not of the form"),
        ((*HEADLINE, "--sweep", "nodes=0..3"), "sweep = 'nodes=0..3' is not of the form"),
        ((*HEADLINE, "--coefficient", "mfu=1"), "there is no coefficient 'mfu'"),
        ((str(TINY), "--tokens", "512"), "--tokens goes with --teacher and --student"),
        ((*HEADLINE, "--loss-budget-mib", "2"), "memory_budget_mib = 2 is too small"),
    ],
)
def test_wrong_questions_are_refused(
    disaggkd: CommandLine, arguments: tuple[str, ...], message: str
) -> None:
    assert message in " ".join(disaggkd("plan", *arguments, expect=2).split())


@pytest.mark.alone
def test_plan_beside_its_run(disaggkd: CommandLine, tmp_path: Path) -> None:
    """Memory and step time are foreseen to 10 %, bytes on the wire exactly."""
    output = disaggkd.run("run", "data.eval_rows=0", steps=20)
    assert re.search(r"planned: a student rank takes \S+ of \S+ GiB \(cpu\)", output)
    run = disaggkd.folder / "run"
    found = json.loads(disaggkd("plan", "--check", run, "--json"))
    token = found["hidden states a token"]
    assert token["planned"] == token["measured"]
    for name in ("memory of a student rank", "step, from the run's rates"):
        assert found[name]["planned"] == pytest.approx(found[name]["measured"], rel=0.1), name
    file = tmp_path / "coefficients.toml"
    disaggkd("calibrate", run, "-o", file)
    assert "student_mfu" in tomllib.loads(file.read_text())
    found = json.loads(disaggkd("plan", "--check", run, "--coefficients", file, "--json"))
    rate = found["tokens/s"]
    assert rate["planned"] == pytest.approx(
        rate["measured"], rel=0.25
    )  # of 19 times as much before
    assert re.search(r"optimizer .* 432,384 B .* 1\.000", disaggkd("plan", "--check", run))


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_memory_is_foreseen_by_component(tmp_path: Path, placement: str) -> None:
    """What is held to the byte, what a moment takes to 5 %, of a run that keeps 430 MiB.

    malloc gives back what is free, which costs time; else its heap adds up to 20 %.
    """
    disaggkd = CommandLine(tmp_path, os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"})
    model = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    settings = [f"student.config.{name}={value}" for name, value in model.items()]
    settings += ["data.sequence_length=256", "data.batch_size=16", "data.eval_rows=0"]
    settings += ["teacher.config.tie_word_embeddings=true", f"teacher.placement={placement}"]
    disaggkd.run("run", *settings, "optim.accumulation=1", steps=4)
    run, file = tmp_path / "run", tmp_path / "coefficients.toml"
    found = json.loads(disaggkd("plan", "--check", run, "--json"))
    held = {"weights", "gradients", "optimizer"}
    ours = {"colocated": {"teacher weights"}, "disaggregated": {"teacher head", "hidden states"}}
    for name in held | ours[placement]:
        assert found[name]["planned"] == found[name]["measured"], name
    for name in ("other memory", "at loss", "at backward", "at optimizer"):
        assert found[name]["planned"] == pytest.approx(found[name]["measured"], rel=0.05), name
    total = found["memory of a student rank"]
    assert total["planned"] == pytest.approx(total["measured"], rel=0.03)
    disaggkd("calibrate", run, "-o", file)
    assert 0.2 < tomllib.loads(file.read_text())["work_layer"] < 0.4
    found = json.loads(disaggkd("plan", "--check", run, "--coefficients", file, "--json"))
    for name in ("other memory", "at backward"):
        assert found[name]["planned"] == pytest.approx(found[name]["measured"], rel=0.001), name


def test_configuration_is_planned(disaggkd: CommandLine) -> None:
    found = json.loads(disaggkd("plan", TINY, "--set", "student.replicas=2", "--json"))
    assert found["disaggregated"]["student_gpus"] == 2
    assert found["disaggregated"]["recompute"] == "none"


def test_figures_that_do_not_exist_are_null(disaggkd: CommandLine) -> None:
    found = json.loads(disaggkd("plan", *HEADLINE, "--nodes-teacher", "0", "--json"))
    assert found["disaggregated"]["step_s"] is None and found["teachers"]["ring_slots"] is None


def test_different_tokenizers_are_seen(disaggkd: CommandLine, tmp_path: Path) -> None:
    config = json.dumps(bundled()["Qwen3-0.6B"]["config"])
    for name, words in (("a", ["one", "two"]), ("b", ["one", "three"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    models = ("--teacher", tmp_path / "a", "--student")
    differing = json.loads(disaggkd("plan", *models, tmp_path / "b", "--json"))["findings"]
    assert [item["text"] for item in differing if item["is_blocking"]] == [
        f"the tokenizers of {tmp_path}/b and {tmp_path}/a differ: use models that share one"
    ]
    same = json.loads(disaggkd("plan", *models, tmp_path / "a", "--json"))["findings"]
    assert "the tokenizers have the same tokens" in [item["text"] for item in same]


def test_job_that_cannot_fit_is_not_queued(disaggkd: CommandLine, tmp_path: Path) -> None:
    settings = ["run.device=cuda", "cluster.gpu=l40s-48", "transport.interface=lo"]
    for role, model in (("teacher", "Qwen3-30B-A3B"), ("student", "Qwen3-8B")):
        (tmp_path / role).mkdir()
        config = json.dumps(bundled()[model]["config"])
        (tmp_path / role / "config.json").write_text(config)
    text = TINY.read_text()
    text = re.sub(r"\n\[(teacher|student)\.config\][^\[]*", "\n", text)
    text = text.replace("[teacher]", f'[teacher]\npath = "{tmp_path}/teacher"')
    text = text.replace("[student]", f'[student]\npath = "{tmp_path}/student"')
    file = tmp_path / "large.toml"
    file.write_text(text)
    arguments = [word for setting in settings for word in ("--set", setting)]
    output = " ".join(disaggkd("submit", file, *arguments, expect=2).split())
    assert re.search(r"a student rank takes \d+ of 39.8 GiB \(l40s-48\)", output)
    assert "--force queues it all the same" in output
    assert not (disaggkd.folder / "run").exists()
