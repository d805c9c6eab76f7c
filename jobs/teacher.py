"""A teacher process: loads the frozen body and serves the students of the run."""

import signal
from dataclasses import asdict

from jobs.roles import (
    EXIT_DONE,
    device_of,
    digest_of,
    liveness_of,
    load_checked,
    on_signals,
    prepare_ucx,
)
from jobs.run_folder import RunFolder
from toolkit.config import Config
from toolkit.models.facts import teacher_facts
from toolkit.models.heads import head_of
from toolkit.models.load import body_of
from toolkit.teacher.sources import TeacherBody
from toolkit.training.metrics import MetricsWriter
from transport.service import TeacherService


def run_teacher(config: Config, folder: RunFolder, index: int) -> int:
    """Serve until the students say bye; after SIGTERM no longer than they need to save."""
    # Slurm warns every task before the time limit: the students save, then say bye.
    on_signals(lambda: None, signal.SIGUSR1, signal.SIGUSR2)
    model = load_checked("teacher", config.teacher, config)
    facts = teacher_facts(model.config, head_of(model), digest_of(config.teacher))
    body = TeacherBody(body_of(model), device_of(config, index))
    del model  # and with it the head
    prepare_ucx(config)
    with (
        MetricsWriter(folder.metrics_file("teacher", index)) as metrics,
        TeacherService(
            folder.path,
            index=index,
            facts=facts.as_dict(),
            interface=config.interface,
            liveness=liveness_of(config),
            checksum=config.transport.checksum,
            binding=config.transport.binding,
            require_rdma=config.transport.require == "rdma",
            on_served=lambda served: metrics.write("served", **asdict(served)),
        ) as service,
    ):
        on_signals(service.stop, signal.SIGTERM)
        service.serve(
            body.answer,
            num_students=config.student.replicas,
            connect_timeout_s=config.transport.connect_timeout_s,
        )
    return EXIT_DONE
