"""What the processes of a run have in common: start, signals, and how they end."""

import faulthandler
import gc
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from jobs.run_folder import Failure, RunFolder
from toolkit.config import Config, ModelSection
from toolkit.data.tokenizer import tokenizer_digest
from toolkit.errors import InputError
from toolkit.models.heads import head_of
from toolkit.models.load import load_model
from toolkit.models.self_test import check_head, check_packing
from transport.errors import DeadlineError, PeerLostError, TransportError
from transport.library import apply_settings, ucx_settings
from transport.liveness import Liveness
from transport.rdma import check_memlock

log = logging.getLogger(__name__)

EXIT_DONE, EXIT_FAILED, EXIT_STOPPED = 0, 1, 75
"""Exit codes of a role; 75 (EX_TEMPFAIL): stopped as asked, with a checkpoint to go on from."""
_EXPECTED = (InputError, TransportError, FloatingPointError)
"""Errors whose message says all that the user can act on; of others the traceback is shown."""


def run_role(role: str, rank: int, folder: Path) -> int:
    """Run a role in this process, to its end; note a failure in the run folder.

    Args:
        role: `teacher` or `student`.
        rank: which one.
        folder: run folder.

    Returns:
        The exit code.
    """
    from jobs.student import run_student
    from jobs.teacher import run_teacher

    gc.freeze()  # what has been imported is never looked through again
    gc.enable()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s"
    )
    faulthandler.enable()  # a crash in native code leaves the stacks in the log
    faulthandler.register(signal.SIGQUIT)  # and so does this, without a crash
    disable_progress_bar()  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent turns Ctrl-C into SIGTERM
    run_folder = RunFolder(folder)
    try:
        config = run_folder.load()
        torch.set_num_threads(config.run.threads)
        return {"teacher": run_teacher, "student": run_student}[role](config, run_folder, rank)
    except Exception as error:
        log.exception("%s %d failed", role, rank)
        expected = isinstance(error, _EXPECTED)
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        trace = "" if expected else traceback.format_exc()
        again = isinstance(error, PeerLostError | DeadlineError)
        run_folder.write_failure(Failure(role, rank, message, trace, again))
        return EXIT_FAILED


def on_signals(action: Callable[[], object], *numbers: signal.Signals) -> None:
    """Let signals run `action`, which must be safe in a handler."""

    def handle(number: int, frame: FrameType | None) -> None:
        action()

    for number in numbers:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # a task of Slurm has blocked them


def load_checked(name: str, section: ModelSection, config: Config) -> PreTrainedModel:
    """Load a model and let it prove what the run takes for granted of it."""
    model = load_model(section)
    check_head(model, head_of(model), name)
    if config.data.packing == "documents":
        check_packing(model, name)
    return model


def digest_of(section: ModelSection) -> str | None:
    """Return the digest of a model's tokenizer, or None if the configuration names none."""
    if section.tokenizer is not None:
        return tokenizer_digest(Path(section.tokenizer))
    if section.path is not None and any(Path(section.path).glob("tokenizer*.json")):
        return tokenizer_digest(Path(section.path))
    return None


def prepare_ucx(config: Config) -> None:
    """Choose the settings of UCX for this process, log them, and check what RDMA needs."""
    settings = apply_settings(ucx_settings(config.interface, config.transport.tls))
    log.info("settings: %s", " ".join(f"{name}={value}" for name, value in settings.items()))
    check_memlock(settings)


def liveness_of(config: Config) -> Liveness:
    """Return how often a side says that it lives, and what follows from silence."""
    transport = config.transport
    return Liveness(transport.heartbeat_s, transport.dead_after_s, transport.grace_s)


def device_of(config: Config, rank: int) -> torch.device:
    """Return where a process computes; of several visible GPUs, ranks of a node take one each."""
    if config.run.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())
