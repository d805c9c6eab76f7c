"""The training loop: steps of micro-batches, resumable between any two of them."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.config import Config, OptimSection
from toolkit.data.batches import Batch, Batches
from toolkit.teacher.sources import TeacherSource
from toolkit.training.checkpoint import Checkpoints
from toolkit.training.metrics import MetricsWriter
from toolkit.training.schedule import learning_rate
from toolkit.training.student import DistilledStudent
from transport.errors import TransportError


class Stopwatch:
    """Splits a step's time: each `lap` gives the seconds since the one before to a name."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Count the time since the last lap under `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class Trainer:
    """Trains a student on a teacher's hidden states."""

    def __init__(
        self,
        config: Config,
        student: DistilledStudent,
        teacher: TeacherSource,
        batches: Batches,
        *,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
    ) -> None:
        """Make the optimizer and resume from the newest whole checkpoint, if there is one.

        Args:
            config: the run.
            student: the student with its loss.
            teacher: where hidden states come from.
            batches: where micro-batches come from.
            checkpoints: where the state is kept.
            metrics: where a record of every step goes.
        """
        self._config = config
        self._student = student
        self._teacher = teacher
        self._batches = batches
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._optimizer = make_optimizer(student.model, config.optim)
        self.step = 0
        """Number of finished steps."""
        self.tokens = 0
        """Labelled tokens trained on."""
        newest = checkpoints.latest()
        if newest is not None:
            state = checkpoints.load(newest, student.model, self._optimizer)
            self.step, self.tokens = state["step"], state["tokens"]
        self._saved_step = self.step  # of a run at its start there is nothing to save

    def train(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until the last step, or until `should_stop` says so after a step; then save.

        Returns:
            Whether all steps are done.

        Raises:
            TransportError: the teachers are lost; the finished steps are saved.
            FloatingPointError: loss or gradient is not finite; nothing of it is saved.
        """
        num_steps, every = self._config.run.steps, self._config.checkpoint.every_steps
        stream = self._teacher.stream(self._batches.training(self.step, num_steps))
        self._student.train()
        try:
            while self.step < num_steps and not should_stop():
                self._train_step(stream)
                if every is not None and self.step % every == 0:
                    self._save()
        except TransportError:
            self._save()
            raise
        self._save()
        return self.step == num_steps

    def _save(self) -> None:
        """Write a checkpoint of the finished steps, unless there is one."""
        if self._saved_step == self.step:
            return
        self._checkpoints.save(
            self.step, self._student.model, self._optimizer, {"tokens": self.tokens}
        )
        self._saved_step = self.step

    def _train_step(self, stream: Iterator[tuple[Batch, Tensor]]) -> None:
        watch, optim = Stopwatch(), self._config.optim
        waited_before, bytes_before = self._teacher.wait_s, self._teacher.num_bytes
        ready = self._teacher.num_ready
        sums = {"loss": 0.0, "kd": 0.0, "ce": 0.0}
        tokens = 0
        for batch, states in islice(stream, optim.accumulation):
            watch.lap("teacher_s")
            loss, kd, ce, num_tokens = self._student(batch, states)
            watch.lap("forward_s")
            loss.backward()
            watch.lap("backward_s")
            tokens += num_tokens
            for name, value in (("loss", loss), ("kd", kd), ("ce", ce)):
                sums[name] += value.item()
        lr = learning_rate(self.step, self._config.run.steps, optim)
        grad_norm = self._update(lr)
        watch.lap("optimizer_s")
        self.step += 1
        self.tokens += tokens
        self._record(
            watch,
            loss=sums["loss"],
            kd=sums["kd"] / tokens,
            ce=sums["ce"] / tokens,
            grad_norm=grad_norm,
            lr=lr,
            step_tokens=tokens,
            wait_s=self._teacher.wait_s - waited_before,
            num_bytes=self._teacher.num_bytes - bytes_before,
            ring_ready=ready,
        )

    def _update(self, lr: float) -> float:
        """Clip, step, and return the norm that the gradient had."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        parameters = [p for p in self._student.model.parameters() if p.grad is not None]
        limit = self._config.optim.clip_norm
        norm = nn.utils.clip_grad_norm_(parameters, torch.inf if limit is None else limit)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def _record(self, watch: Stopwatch, **values: Any) -> None:
        step_s = sum(watch.seconds.values())
        self._metrics.write(
            "step",
            step=self.step,
            steps=self._config.run.steps,
            tokens=self.tokens,
            tokens_per_s=values["step_tokens"] / step_s,
            step_s=step_s,
            **values,
            **watch.seconds,
        )
        if not all(map(torch.isfinite, torch.tensor([values["loss"], values["grad_norm"]]))):
            raise FloatingPointError(
                f"step {self.step}: loss {values['loss']}, gradient norm {values['grad_norm']}: "
                "lower optim.lr, add optim.warmup_steps, or resume from the last checkpoint"
            )


def make_optimizer(model: nn.Module, section: OptimSection) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); only matrices decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )
