"""A student process: trains one rank, and evaluates before and after."""

import signal
import time
from dataclasses import asdict
from pathlib import Path
from threading import Event

import torch
from torch import nn

from jobs.roles import (
    EXIT_DONE,
    EXIT_STOPPED,
    device_of,
    digest_of,
    liveness_of,
    load_checked,
    on_signals,
    prepare_ucx,
)
from jobs.run_folder import RunFolder
from toolkit.config import Config
from toolkit.data.batches import Batches
from toolkit.data.tokens import open_tokens
from toolkit.models.facts import (
    TeacherFacts,
    check_same_tokenizer,
    check_same_vocabulary,
    teacher_facts,
)
from toolkit.models.heads import head_of, load_head
from toolkit.models.load import body_of, load_config, torch_dtype
from toolkit.teacher.pinning import pin_for
from toolkit.teacher.sources import ColocatedTeacher, RemoteTeachers, TeacherBody, TeacherSource
from toolkit.training.checkpoint import Checkpoints
from toolkit.training.evaluate import evaluate
from toolkit.training.memory import PeakMemory
from toolkit.training.metrics import MetricsWriter
from toolkit.training.ranks import Ranks, joined
from toolkit.training.student import DistilledStudent
from toolkit.training.trainer import Trainer
from transport.errors import DeadlineError, PeerLostError, TransportError
from transport.layout import RingGeometry
from transport.pool import TeacherPool

_LOOK_S = 1.0


def run_student(config: Config, folder: RunFolder, rank: int) -> int:
    """Train to the last step; SIGTERM, SIGUSR1 and SIGUSR2 save after the step under way."""
    stop = Event()
    on_signals(stop.set, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    ranks = Ranks(rank, config.student.replicas, device_of(config, rank))
    with MetricsWriter(folder.metrics_file("student", rank)) as metrics:
        try:
            done = _StudentRun(config, folder, ranks, metrics, stop).run()
        except TransportError:  # when all are told to end at once, teachers may be gone first
            if not stop.is_set():
                raise
            done = False
        metrics.write("phase", phase="done" if done else "stopped")
    if done and ranks.is_first:
        folder.done.touch()
    return EXIT_DONE if done else EXIT_STOPPED


class _StudentRun:
    """One rank, from its models to its last evaluation."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        ranks: Ranks,
        metrics: MetricsWriter,
        stop: Event,
    ) -> None:
        self._config = config
        self._folder = folder
        self._ranks = ranks
        self._metrics = metrics
        self._stop = stop
        model = load_checked("student", config.student, config)
        self._colocated = None
        if config.teacher.placement == "colocated":
            teacher = load_checked("teacher", config.teacher, config)
            nn.Module.to(teacher, ranks.device)  # with its head, which may be its embedding
            self._colocated = ColocatedTeacher(TeacherBody(body_of(teacher), ranks.device))
            head = head_of(teacher).detach()
        else:
            head = load_head(config.teacher)
        self._facts = teacher_facts(load_config(config.teacher), head, digest_of(config.teacher))
        self._batches = _open_batches(config, head_of(model).vocab_size, self._facts, ranks)
        self._student = DistilledStudent(model, head, config.loss, ranks.device)

    def run(self) -> bool:
        """Evaluate, train, evaluate; return whether all is done."""
        config, ranks = self._config, self._ranks
        # A rank may wait for its teachers while the others already wait for it.
        timeout_s = config.transport.connect_timeout_s + config.transport.take_timeout_s
        with (
            self._open_teacher() as teacher,
            joined(ranks, self._folder.path, config.interface, timeout_s),
        ):
            trainer = Trainer(
                config,
                self._student,
                teacher,
                self._batches,
                checkpoints=Checkpoints(self._folder.checkpoints, config.checkpoint.keep, ranks),
                metrics=self._metrics,
                ranks=ranks,
                memory=PeakMemory(ranks.device),
            )
            if trainer.step == 0 and not self._evaluated("before", teacher):
                return False
            self._metrics.write("phase", phase="training")
            # At least one step, also when the warning came early: else no start would get further.
            start = trainer.step
            done = trainer.train(lambda step: self._stop.is_set() and step > start)
            return done and self._evaluated("after", teacher)

    def _evaluated(self, when: str, teacher: TeacherSource) -> bool:
        """Evaluate, unless that is done or not wanted; return whether it came to its end."""
        if not self._config.data.eval_rows or when in self._folder.results():
            return True
        self._ranks.wait()  # until all have looked
        self._metrics.write("phase", phase=f"evaluation {when}")
        batches = self._batches.held_out()
        result = evaluate(self._student, teacher, batches, self._ranks, self._stop.is_set)
        if result is not None and self._ranks.is_first:
            self._folder.add_result(when, asdict(result))
        return result is not None

    def _open_teacher(self) -> TeacherSource:
        """Return the teacher, in this process or behind a ring, as the configuration says."""
        if self._colocated is not None:
            return self._colocated
        config, dtype = self._config, torch_dtype(self._config.teacher)
        return RemoteTeachers(
            self._connect(dtype),
            hidden_size=self._facts.hidden_size,
            dtype=dtype,
            device=self._ranks.device,
            timeout_s=config.transport.take_timeout_s,
        )

    def _connect(self, dtype: torch.dtype) -> TeacherPool:
        config, hidden_size = self._config, self._facts.hidden_size
        prepare_ucx(config)
        slots = config.ring.slots + config.ring.spare_slots
        pool = TeacherPool(
            self._folder.path,
            RingGeometry(slots, config.slot_tokens, hidden_size, dtype.itemsize),
            rank=self._ranks.rank,
            facts=self._facts.as_dict(),
            liveness=liveness_of(config),
            num_spare_slots=config.ring.spare_slots,
            order_timeout_s=config.transport.order_timeout_s,
            pin=pin_for(self._ranks.device),
            binding=config.transport.binding,
        )
        self._metrics.write("phase", phase="waiting for teachers")
        try:
            self._wait_for_teacher(pool)
        except BaseException:
            pool.close()
            raise
        return pool

    def _wait_for_teacher(self, pool: TeacherPool) -> None:
        """Wait for the first teacher, unless all fail; the others may join later."""
        deadline = time.monotonic() + self._config.transport.connect_timeout_s
        while True:
            try:
                pool.connect(1, min(_LOOK_S, deadline - time.monotonic()))
                return
            except DeadlineError:
                failures = self._folder.teacher_failures()
                if len(failures) >= self._config.num_teachers:
                    raise PeerLostError("all teachers failed; see their logs") from None
                if time.monotonic() > deadline:
                    limit_s = self._config.transport.connect_timeout_s
                    raise DeadlineError(
                        f"no teacher came within {limit_s:g} s; see the teachers' logs"
                    ) from None


def _open_batches(config: Config, vocab_size: int, facts: TeacherFacts, ranks: Ranks) -> Batches:
    """Open the token file, once vocabularies and tokenizers are known to agree."""
    check_same_vocabulary(vocab_size, facts.vocab_size)
    tokens = open_tokens(Path(config.data.tokens))
    check_same_tokenizer(digest_of(config.student), facts.tokenizer_digest, tokens.tokenizer_digest)
    return Batches(
        tokens,
        config.data,
        seed=config.run.seed,
        accumulation=config.optim.accumulation,
        vocab_size=vocab_size,
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
