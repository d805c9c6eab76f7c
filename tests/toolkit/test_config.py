"""Configurations: every mistake is named with its remedy, and files round-trip."""

import tomllib
from pathlib import Path

import pytest

from toolkit.config import Config
from toolkit.config_file import changes, dump_config, load_config, parse_config
from toolkit.errors import InputError

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.toml"))
TINY = next(path for path in EXAMPLES if path.stem == "tiny")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_and_round_trip(path: Path) -> None:
    config = load_config(path)
    assert parse_config(tomllib.loads(dump_config(config)), "again") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.replica=2", "unknown key teacher.replica; did you mean replicas?"),
        ("los.beta=0.5", "unknown key los; did you mean loss?"),
        ("run.xyzzy=1", "unknown key run.xyzzy; valid are device, folder, seed, steps, threads"),
        ("run.steps=0", "run.steps: Input should be greater than 0"),
        ("run.steps='many'", "run.steps: Input should be a valid integer"),
        ("optim.lr=fast", "optim.lr: Input should be a valid number"),
        ("teacher.placement=remote", "teacher.placement: Input should be 'colocated' or"),
        ("loss.beta=1.0", "loss.beta: Input should be less than 1"),
        ("ring.slots=1", "ring.slots: Input should be greater than or equal to 2"),
        ("student.dtype=bfloat16", "student.dtype: Input should be 'float32'"),
        ("teacher.path=models/x", "teacher: give exactly one of `path`"),
        ("transport.dead_after_s=1.5", "dead_after_s = 1.5 must be at least twice heartbeat_s"),
        ("ring.slot_tokens=100", "a micro-batch has 4 x 64 = 256 tokens but ring.slot_tokens = 10"),
        ("steps", "override 'steps' must have the form section.key=value"),
        ("run.steps.more=1", "override 'run.steps.more=1': steps is no table"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_config(TINY, [override])
    assert message in str(caught.value)


def test_missing_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[run]\nsteps = 3\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.folder is missing"):
        load_config(file)


def test_unreadable_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the configuration"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n", encoding="utf-8")
    with pytest.raises(InputError, match="is not TOML"):
        load_config(broken)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        load_config(TINY, ["run.steps=0", "data.packing=maybe"])
    assert "run.steps" in str(caught.value) and "data.packing" in str(caught.value)


def test_overrides_are_toml_values_or_bare_words() -> None:
    config = load_config(TINY, ["optim.lr=3e-4", "run.folder=runs/a b", "optim.betas=[0.8, 0.9]"])
    assert config.optim.lr == 3e-4
    assert Path(config.run.folder) == Path.cwd() / "runs/a b"
    assert config.optim.betas == (0.8, 0.9)


def test_configurations_cannot_be_changed() -> None:
    config = load_config(TINY)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


def test_changes_name_what_alters_the_computation() -> None:
    def variant(*overrides: str) -> Config:
        return load_config(TINY, overrides)

    layout = variant("teacher.placement=colocated", "ring.slots=8", "checkpoint.keep=5")
    assert changes(variant(), layout) == []
    other = changes(variant(), variant("optim.lr=1.0", "teacher.config.hidden_size=48"))
    assert [(c.key, c.old, c.new) for c in other] == [
        ("optim.lr", 3e-3, 1.0),
        ("teacher.config.hidden_size", 96, 48),
    ]
