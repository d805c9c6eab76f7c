"""A whole run in this process: tiny random models, a colocated teacher, a real token file."""

from collections.abc import Callable
from pathlib import Path

import torch

from toolkit.config import Config
from toolkit.config_file import load_config
from toolkit.data.batches import Batches
from toolkit.data.tokens import open_tokens
from toolkit.models.heads import head_of, load_head
from toolkit.models.load import body_of, load_model
from toolkit.teacher.sources import ColocatedTeacher, TeacherBody
from toolkit.training.checkpoint import Checkpoints
from toolkit.training.memory import PeakMemory
from toolkit.training.metrics import MetricsWriter
from toolkit.training.ranks import ALONE
from toolkit.training.student import DistilledStudent
from toolkit.training.trainer import Trainer

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny.toml"


def tiny_config(folder: Path, *overrides: str) -> Config:
    """Return the tiny example for a run folder, with overrides."""
    return load_config(EXAMPLE, [f"run.folder={folder}", *overrides])


def make_student(config: Config) -> DistilledStudent:
    """Return the configuration's student at its random start."""
    return DistilledStudent(load_model(config.student), load_head(config.teacher), config.loss, CPU)


def make_teacher(config: Config) -> ColocatedTeacher:
    """Return the configuration's teacher."""
    return ColocatedTeacher(TeacherBody(body_of(load_model(config.teacher)), CPU))


def make_batches(config: Config, student: DistilledStudent) -> Batches:
    """Return the configuration's batches."""
    return Batches(
        open_tokens(Path(config.data.tokens)),
        config.data,
        seed=config.run.seed,
        accumulation=config.optim.accumulation,
        vocab_size=head_of(student.model).vocab_size,
    )


def train(config: Config, should_stop: Callable[[int], bool] = lambda step: False) -> Trainer:
    """Train in the run folder, resuming what is there; `should_stop` gets the finished steps."""
    folder = Path(config.run.folder)
    student = make_student(config)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        trainer = Trainer(
            config,
            student,
            make_teacher(config),
            make_batches(config, student),
            checkpoints=Checkpoints(folder / "checkpoints", config.checkpoint.keep),
            metrics=metrics,
            ranks=ALONE,
            memory=PeakMemory(torch.device("cpu")),
        )
        trainer.train(should_stop)
    return trainer
