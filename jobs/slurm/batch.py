"""The Slurm job of a run: its components, its shell script, and when it has itself requeued."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jobs.preflight import check_inputs
from jobs.run_folder import RunFolder
from jobs.slurm.components import Component, Value, sbatch_header, srun_command
from toolkit.config import ComponentSection, Config
from toolkit.errors import InputError
from transport.rendezvous import write_atomically

SRUN_OPTIONS = ("--unbuffered", "--kill-on-bad-exit=0", "--no-kill")
"""A role that cannot go on saves and ends by itself; srun shall not end it first."""


def components_of(config: Config) -> list[Component]:
    """Return the components of a run's job; the student leads.

    Raises:
        InputError: the run has no teachers of its own, or no network between its nodes.
    """
    if config.transport.interface is None:
        raise InputError(
            "transport.interface is not set: name the network interface by which the nodes reach "
            "each other, for example ib0 (lo, if all are one machine)"
        )
    if not config.num_teachers:
        raise InputError(
            "teacher.placement = 'colocated' needs no heterogeneous job; "
            "only disaggregated runs are submitted"
        )
    cluster = config.cluster
    return [
        _component("student", config.student.replicas, cluster.student),
        _component("teacher", config.teacher.replicas, cluster.teacher),
    ]


def _component(role: str, replicas: int, section: ComponentSection) -> Component:
    return Component(
        role=role,
        nodes=section.nodes,
        tasks_per_node=replicas // section.nodes,
        cpus_per_task=section.cpus_per_task,
        gpus_per_node=section.gpus_per_node,
        partition=section.partition,
        options={"no-kill": True, **section.options},  # a dead node costs its tasks, not the job
        srun_options=tuple(section.srun_options),
    )


def job_name(config: Config) -> str:
    """Return the job's name in Slurm's lists; the word hetjob would end an `#SBATCH` line."""
    return Path(config.run.folder).name.replace("hetjob", "het-job")


def job_options(name: str) -> dict[str, Value]:
    """Return the sbatch options of the job as a whole.

    The script writes its own log: of a path in an `#SBATCH` line Slurm would expand `%`.
    """
    return {"job-name": name, "output": "/dev/null"}


def common_options(config: Config) -> dict[str, Value]:
    """Return the sbatch options of every component."""
    cluster = config.cluster
    return {
        "time": cluster.time_min,
        "requeue": True,
        "signal": f"USR2@{cluster.warning_s}",
        **cluster.options,
    }


def prologue(config: Config, folder: RunFolder) -> list[str]:
    """Return the first shell lines of every job of a run."""
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in config.cluster.environment.items()
    ]
    return [
        f"run={shlex.quote(str(folder.path))}",
        'mkdir -p "$run/logs" "$run/restarts"',
        'exec >>"$run/logs/batch.log" 2>&1 </dev/null',
        'echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, $(date -Is)"',
        *config.cluster.setup,
        *exports,
        f"export OMP_NUM_THREADS={config.run.threads} PYTHONSAFEPATH=1",
    ]


def begin(config: Config) -> list[str]:
    """Return the shell lines between the prologue and srun, in a run's own job.

    srun waits for the tasks of a dead node until the controller tells it, and the controller tells
    it once. When a student has failed all others end by themselves; an srun that still waits
    `cluster.end_s` after that is killed, so that the job can begin again.
    """
    return [
        'if [ -e "$run/done" ]; then exit 0; fi',
        'rm -rf "$run/peers" "$run/failed" "$run/lost-teachers"  # of an earlier start',
        "srun() {",
        '    command srun "$@" &',
        "    tasks=$!",
        f'    (waited=0; while [ "$waited" -lt {config.cluster.end_s} ]; do',
        '         sleep 5; if [ -e "$run/failed" ]; then waited=$((waited + 5)); fi',
        "     done",
        f'     echo "srun still waits {config.cluster.end_s} s after a failure: it is killed"',
        '     kill -KILL "$tasks") &',
        "    watch=$!",
        '    wait "$tasks"',
        "    code=$?",
        '    { kill "$watch"; wait "$watch"; } 2>/dev/null',
        '    return "$code"',
        "}",
    ]


def epilogue(config: Config) -> list[str]:
    """Return the shell lines after srun: done, failed for good, or once more."""
    return [
        'if [ -e "$run/done" ]; then exit 0; fi',
        "restart=${SLURM_RESTART_COUNT:-0}",
        'why="$run/restarts/$SLURM_JOB_ID-$restart.json"',
        'if [ -e "$run/failed" ]; then',
        '    if ! grep -q \'"again": true\' "$run/failed"; then exit 1; fi',
        '    cp "$run/failed" "$why"',
        'elif [ "$code" = 0 ]; then',
        '    echo \'{"error": "stopped, as at a time limit or preemption"}\' >"$why"',
        "else",
        '    echo "{\\"error\\": \\"tasks were killed: srun ended with $code\\"}" >"$why"',
        "fi",
        f'if [ "$restart" -lt {config.cluster.max_restarts} ]; then',
        "    trap '' TERM  # Slurm ends this script while it answers",
        "    for pause in 5 20 60; do  # a busy controller may not answer",
        '        scontrol requeue "$SLURM_JOB_ID" && sleep 60',
        '        sleep "$pause"',
        "    done",
        "fi",
        "exit 1",
    ]


def batch_file(config: Config, folder: RunFolder) -> str:
    """Return a plain batch file: readable, editable, and fit to be submitted again and again."""
    components = components_of(config)
    commands = {
        "student": _role_command("student", folder, 0),
        "teacher": _role_command("teacher", folder, -config.student.replicas),
    }
    lines = [
        "#!/bin/bash",
        "# Written by `disaggkd sbatch`. Check it with `sbatch --test-only`, submit it with",
        "# `sbatch`, as often as you like: it goes on from the newest checkpoint.",
        *sbatch_header(components, job_options(job_name(config)), common_options(config)),
        "",
        *prologue(config, folder),
        *begin(config),
        "",
        srun_command(components, commands, SRUN_OPTIONS),
        "code=$?",
        'echo "srun ended with $code, $(date -Is)"',
        "",
        *epilogue(config),
    ]
    return "\n".join(lines) + "\n"


def write_batch_file(config: Config, folder: RunFolder, path: Path) -> Path:
    """Write the plain batch file of a run, and the run folder that it works in.

    Raises:
        InputError: the configuration cannot be submitted, or its inputs are not there.
    """
    check_inputs(config)
    text = batch_file(config, folder)
    folder.create(config)
    write_atomically(path, text)
    return path


def teachers_file(config: Config, folder: RunFolder, nodes: int, first: int) -> str:
    """Return a batch file with further teachers for a run that goes on.

    Args:
        config: the run's.
        folder: its folder.
        nodes: how many nodes of teachers.
        first: index of the first of them.
    """
    own = components_of(config)[1]
    teacher = replace(own, nodes=nodes)
    options = job_options(f"{job_name(config)}-teachers")
    common = {"time": config.cluster.time_min, **config.cluster.options}
    lines = [
        "#!/bin/bash",
        *sbatch_header([teacher], options, common),
        "",
        *prologue(config, folder),
        "",
        srun_command([teacher], {"teacher": _role_command("teacher", folder, first)}, SRUN_OPTIONS),
    ]
    return "\n".join(lines) + "\n"


def _role_command(role: str, folder: RunFolder, shift: int) -> Sequence[str]:
    command = [sys.executable, "-m", "jobs", "role", role, "--run", str(folder.path)]
    return [*command, f"--shift={shift}"]
