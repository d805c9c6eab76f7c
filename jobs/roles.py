"""What the processes of a run do: a teacher serves, a student trains."""

import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from threading import Event
from types import FrameType

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from jobs.run_folder import RunFolder
from toolkit.config import Config, ModelSection
from toolkit.data.batches import Batch, Batches
from toolkit.data.tokenizer import tokenizer_digest
from toolkit.data.tokens import open_tokens
from toolkit.errors import InputError
from toolkit.models.facts import (
    TeacherFacts,
    check_same_tokenizer,
    check_same_vocabulary,
    teacher_facts,
)
from toolkit.models.heads import head_of, load_head
from toolkit.models.load import body_of, load_config, load_model, torch_dtype
from toolkit.models.self_test import check_head, check_packing
from toolkit.teacher.sources import ColocatedTeacher, RemoteTeachers, TeacherBody, TeacherSource
from toolkit.training.checkpoint import Checkpoints
from toolkit.training.evaluate import evaluate
from toolkit.training.metrics import MetricsWriter
from toolkit.training.student import DistilledStudent
from toolkit.training.trainer import Trainer
from transport.control import Liveness
from transport.errors import TransportError
from transport.layout import RingGeometry
from transport.library import apply_settings, find_ucx, ucx_settings
from transport.pool import TeacherPool
from transport.service import Served, TeacherService
from transport.ucx import version

log = logging.getLogger(__name__)

EXIT_DONE, EXIT_FAILED, EXIT_STOPPED = 0, 1, 75
"""Exit codes of a role; 75 (EX_TEMPFAIL): stopped as asked, with a checkpoint to go on from."""
_EXPECTED = (InputError, TransportError, FloatingPointError)
"""Errors whose message says all that the user can act on; of others the traceback is shown."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(Exception):
    """The process was asked to end before there was something to save."""


def run_role(role: str, rank: int, folder: Path) -> int:
    """Run a role in this process, to its end; note a failure in the run folder.

    Args:
        role: `teacher` or `student`.
        rank: which one.
        folder: run folder.

    Returns:
        The exit code.
    """
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s"
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    run_folder = RunFolder(folder)
    try:
        config = run_folder.load()
        torch.set_num_threads(config.run.threads)
        return {"teacher": run_teacher, "student": run_student}[role](config, run_folder, rank)
    except Stopped:
        return EXIT_STOPPED
    except Exception as error:
        log.exception("%s %d failed", role, rank)
        expected = isinstance(error, _EXPECTED)
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        trace = "" if expected else traceback.format_exc()
        run_folder.write_failure(role, rank, message, trace)
        return EXIT_FAILED


def run_teacher(config: Config, folder: RunFolder, index: int) -> int:
    """Load the frozen body and serve the students of the run."""
    model = load_model(config.teacher)
    _check_model(model, "teacher", config)
    facts = teacher_facts(model.config, head_of(model), _digest(config.teacher))
    body = TeacherBody(body_of(model), torch.device(config.run.device))
    del model
    _open_ucx(config)
    with (
        MetricsWriter(folder.metrics_file("teacher", index)) as metrics,
        TeacherService(
            folder.path,
            index=index,
            facts=facts.as_dict(),
            interface=config.transport.interface,
            liveness=_liveness(config),
            on_served=lambda served: _record_served(metrics, served),
        ) as service,
    ):
        _on_stop(service.stop)
        service.serve(
            body.answer,
            num_students=1,
            connect_timeout_s=config.transport.connect_timeout_s,
        )
    return EXIT_DONE


def run_student(config: Config, folder: RunFolder, rank: int) -> int:
    """Train the student, evaluating it before and after."""
    stop = Event()
    _on_stop(stop.set)
    model = load_model(config.student)
    _check_model(model, "student", config)
    head = load_head(config.teacher)
    facts = teacher_facts(load_config(config.teacher), head, _digest(config.teacher))
    batches = _open_batches(config, model_vocab=head_of(model).vocab_size, facts=facts)
    student = DistilledStudent(model, head, config.loss, torch.device(config.run.device))
    with MetricsWriter(folder.metrics_file("student", rank)) as metrics:
        try:
            with _open_teacher(config, folder, facts, rank, metrics) as teacher:
                done = _distill(config, folder, student, teacher, batches, metrics, stop)
        except TransportError:  # when all are told to end at once, teachers may be gone first
            if not stop.is_set():
                raise
            done = False
        metrics.write("phase", phase="done" if done else "stopped")
    if done:
        folder.done.touch()
    return EXIT_DONE if done else EXIT_STOPPED


def _distill(
    config: Config,
    folder: RunFolder,
    student: DistilledStudent,
    teacher: TeacherSource,
    batches: Batches,
    metrics: MetricsWriter,
    stop: Event,
) -> bool:
    """Evaluate, train, evaluate; return whether all is done."""
    trainer = Trainer(
        config,
        student,
        teacher,
        batches,
        checkpoints=Checkpoints(folder.checkpoints, config.checkpoint.keep),
        metrics=metrics,
    )

    def measure(when: str) -> None:
        if config.data.eval_rows and when not in folder.results():
            metrics.write("phase", phase=f"evaluation {when}")
            held_out = _until_stopped(batches.held_out(), stop)
            folder.add_result(when, asdict(evaluate(student, teacher, held_out)))

    if trainer.step == 0:
        measure("before")
    metrics.write("phase", phase="training")
    if not trainer.train(stop.is_set):
        return False
    measure("after")
    return True


def _open_teacher(
    config: Config, folder: RunFolder, facts: TeacherFacts, rank: int, metrics: MetricsWriter
) -> TeacherSource:
    """Return the teacher, in this process or behind a ring, as the configuration says."""
    device = torch.device(config.run.device)
    if config.teacher.placement == "colocated":
        teacher = load_model(config.teacher)
        _check_model(teacher, "teacher", config)
        return ColocatedTeacher(TeacherBody(body_of(teacher), device))
    _open_ucx(config)
    dtype = torch_dtype(config.teacher)
    pool = TeacherPool(
        folder.path,
        RingGeometry(config.ring.slots, config.slot_tokens, facts.hidden_size, dtype.itemsize),
        rank=rank,
        facts=facts.as_dict(),
        liveness=_liveness(config),
    )
    metrics.write("phase", phase="waiting for teachers")
    try:
        names = pool.connect(config.teacher.replicas, config.transport.connect_timeout_s)
    except BaseException:
        pool.close()
        raise
    log.info("teachers: %s", ", ".join(names))
    return RemoteTeachers(
        pool,
        hidden_size=facts.hidden_size,
        dtype=dtype,
        device=device,
        timeout_s=config.transport.take_timeout_s,
    )


def _open_batches(config: Config, model_vocab: int, facts: TeacherFacts) -> Batches:
    """Open the token file, once vocabularies and tokenizers are known to agree."""
    check_same_vocabulary(model_vocab, facts.vocab_size)
    tokens = open_tokens(Path(config.data.tokens))
    check_same_tokenizer(_digest(config.student), facts.tokenizer_digest, tokens.tokenizer_digest)
    return Batches(
        tokens,
        config.data,
        seed=config.run.seed,
        accumulation=config.optim.accumulation,
        vocab_size=model_vocab,
    )


def _check_model(model: PreTrainedModel, name: str, config: Config) -> None:
    check_head(model, head_of(model), name)
    if config.data.packing == "documents":
        check_packing(model, name)


def _digest(section: ModelSection) -> str | None:
    """Return the digest of a model's tokenizer, if the configuration names one."""
    folder = section.tokenizer or section.path
    if folder is None or (section.tokenizer is None and not _has_tokenizer(Path(folder))):
        return None
    return tokenizer_digest(Path(folder))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _open_ucx(config: Config) -> None:
    settings = apply_settings(ucx_settings(config.transport.interface, config.transport.tls))
    log.info("UCX %s from %s", version(), find_ucx())
    log.info("settings: %s", " ".join(f"{name}={value}" for name, value in settings.items()))


def _liveness(config: Config) -> Liveness:
    return Liveness(config.transport.heartbeat_s, config.transport.dead_after_s)


def _record_served(metrics: MetricsWriter, served: Served) -> None:
    metrics.write("served", **asdict(served))


def _until_stopped(batches: Iterator[Batch], stop: Event) -> Iterator[Batch]:
    for batch in batches:
        if stop.is_set():
            raise Stopped
        yield batch


def _on_stop(action: Callable[[], object]) -> None:
    """Let the stop signals run `action`; SIGINT is the parent's to turn into one of them."""

    def handle(signum: int, frame: FrameType | None) -> None:
        action()

    for number in _STOP_SIGNALS:
        signal.signal(number, handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
