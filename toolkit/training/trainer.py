"""The training loop: steps of micro-batches, resumable between any two of them."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.config import Config, OptimSection
from toolkit.data.batches import Batch, Batches
from toolkit.losses.distillation import LossSums
from toolkit.teacher.sources import TeacherSource
from toolkit.training.checkpoint import Checkpoints
from toolkit.training.memory import PeakMemory, bytes_of
from toolkit.training.metrics import MetricsWriter
from toolkit.training.ranks import Ranks
from toolkit.training.schedule import learning_rate
from toolkit.training.student import DistilledStudent
from transport.errors import TransportError

_MEASURED_STEPS = 2
"""Of a start: the first makes what the second finds."""


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
        ranks: Ranks,
        memory: PeakMemory,
    ) -> None:
        """Make the optimizer and resume from the newest whole checkpoint, if there is one.

        Args:
            config: the run.
            student: the student with its loss.
            teacher: where hidden states come from.
            batches: where micro-batches come from.
            checkpoints: where the state is kept.
            metrics: where a record of every step goes.
            ranks: the ranks that train this student together.
            memory: of this process.
        """
        self._config = config
        self._student = student
        self._teacher = teacher
        self._batches = batches
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._ranks = ranks
        self._memory = memory
        self._optimizer = make_optimizer(student.model, config.optim)
        self.step = 0
        """Number of finished steps."""
        self.tokens = 0
        """Labelled tokens trained on."""
        newest = checkpoints.latest()
        if newest is not None:
            state = checkpoints.load(newest, student.model, self._optimizer)
            self.step, self.tokens = state["step"], state["tokens"]
        self._first_step = self.step
        self._saved_step = self.step  # of a run at its start there is nothing to save
        self._updating = False  # while it is, the weights belong to no step
        self._replica = ranks.replicate(student)
        if ranks.size > 1:
            self._rehearse(next(batches.training(self.step, self.step + 1)))

    def train(self, should_stop: Callable[[int], bool] = lambda step: False) -> bool:
        """Train until the last step, or until `should_stop` says so; then save.

        All ranks stop after the same step, as soon as one of them should.

        Args:
            should_stop: says whether to stop after this many steps.

        Returns:
            Whether all steps are done.

        Raises:
            TransportError: the teachers are lost; the finished steps are saved.
            RuntimeError: another rank is lost; the same.
            FloatingPointError: loss or gradient is not finite; nothing of it is saved.
        """
        num_steps, every = self._config.run.steps, self._config.checkpoint.every_steps
        stream = self._teacher.stream(self._batches.training(self.step, num_steps))
        self._student.train()
        self._memory.reset()
        try:
            stopping = self._ranks.sum(should_stop(self.step))[0] > 0
            while self.step < num_steps and not stopping:
                stopping = self._train_step(stream, should_stop)
                if every is not None and self.step % every == 0:
                    self._save()
        except (TransportError, RuntimeError):
            if self._ranks.is_first and not self._updating:
                self._save(alone=True)  # the other ranks may be gone
            raise
        self._save()
        return self.step == num_steps

    def _rehearse(self, batch: Batch) -> None:
        """Let DDP arrange its buckets, as it does after the first backward, before the first step.

        Which numbers lie in one bucket decides the order in which the ranks' gradients are added:
        a resumed run must not have a first step of its own.
        """
        with torch.random.fork_rng(devices=[]):
            torch.autograd.backward(self._replica(batch, self._student.no_states(batch)).loss)
        self._optimizer.zero_grad(set_to_none=True)

    def _save(self, *, alone: bool = False) -> None:
        """Write a checkpoint of the finished steps, unless there is one."""
        if self._saved_step != self.step:
            state = {"tokens": self.tokens}
            self._checkpoints.save(
                self.step, self._student.model, self._optimizer, state, alone=alone
            )
            self._saved_step = self.step

    def _train_step(
        self, stream: Iterator[tuple[Batch, Tensor]], should_stop: Callable[[int], bool]
    ) -> bool:
        """Do one step; return whether some rank should stop."""
        watch, optim = Stopwatch(), self._config.optim
        waited_before, bytes_before = self._teacher.wait_s, self._teacher.num_bytes
        ready = self._teacher.num_ready
        self._seed()
        own = [0.0, 0.0, 0.0, 0.0]
        for number, (batch, states) in enumerate(islice(stream, optim.accumulation), 1):
            self._lap(watch, "teacher_s", "teacher forward")
            with self._ranks.averaging(self._replica, number == optim.accumulation):
                sums: LossSums = self._replica(batch, states)
                self._lap(watch, "forward_s", "loss")
                torch.autograd.backward(sums.loss * self._ranks.size)  # a sum, not a mean
            self._lap(watch, "backward_s", "backward")
            parts = (sums.loss.item(), sums.kd.item(), sums.ce.item(), float(sums.num_tokens))
            own = [total + part for total, part in zip(own, parts, strict=True)]
        loss, kd, ce, tokens, stopping = self._ranks.sum(*own, should_stop(self.step + 1))
        watch.lap("ranks_s")
        lr = learning_rate(self.step, self._config.run.steps, optim)
        self._updating = True
        grad_norm = self._update(lr)
        self.step += 1
        self.tokens += int(tokens)
        self._updating = False
        watch.lap("optimizer_s")
        self._record(
            watch,
            loss=loss,
            kd=kd / tokens,
            ce=ce / tokens,
            grad_norm=grad_norm,
            lr=lr,
            step_tokens=int(tokens),
            wait_s=self._teacher.wait_s - waited_before,
            num_bytes=self._teacher.num_bytes - bytes_before,
            ring_ready=ready,
            num_teachers=self._teacher.num_teachers,
        )
        return stopping > 0

    def _seed(self) -> None:
        """Make what is random in a step, such as dropout, a function of seed, step and rank."""
        words = np.random.SeedSequence((self._config.run.seed, self.step, self._ranks.rank))
        torch.manual_seed(int(words.generate_state(1, np.uint64)[0]) >> 1)

    def _update(self, lr: float) -> float:
        """Clip, step, and return the norm that the gradient had."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        parameters = [p for p in self._student.model.parameters() if p.grad is not None]
        limit = self._config.optim.clip_norm
        norm = nn.utils.clip_grad_norm_(parameters, torch.inf if limit is None else limit)
        self._optimizer.step()
        gradients = bytes_of(p.grad for p in parameters if p.grad is not None)
        self._optimizer.zero_grad(set_to_none=True)
        if self._measures_memory:
            self._memory.lap("optimizer")
            self._record_memory(gradients)
        return norm.item()

    @property
    def _measures_memory(self) -> bool:
        return self.step - self._first_step < _MEASURED_STEPS

    def _lap(self, watch: Stopwatch, name: str, moment: str) -> None:
        watch.lap(name)
        if self._measures_memory:
            self._memory.lap(moment)

    def _record_memory(self, gradients: int) -> None:
        """Say what is held between two steps, by component, and the peak of every moment."""
        head, moments = self._student.teacher_head, self._optimizer.state.values()
        held = {
            "weights": bytes_of(self._student.model.parameters()),
            "gradients": gradients,
            "optimizer": bytes_of(t for state in moments for t in state.values() if t.ndim),
            "teacher head": bytes_of(t for t in (head.weight, head.bias) if t is not None),
        }
        self._metrics.write(
            "memory",
            held=held | self._teacher.held,
            moments=self._memory.moments,
            between_steps=self._memory.now(),
            **self._memory.outside(),
        )

    def _record(self, watch: Stopwatch, **values: Any) -> None:
        step_s = sum(watch.seconds.values())
        self._metrics.write(
            "step",
            step=self.step,
            steps=self._config.run.steps,
            tokens=self.tokens,
            tokens_per_s=values["step_tokens"] / step_s,
            step_s=step_s,
            peak_bytes=self._memory.peak(),
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
