"""The command line. Heavy imports stand inside the commands, so that help comes at once."""

import gc
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jobs.planning.command import calibrate, plan
from toolkit.errors import InputError

app = typer.Typer(
    name="disaggkd",
    help="Distill large language models with teachers on nodes of their own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigArgument = Annotated[Path, typer.Argument(help="Configuration, TOML.", metavar="CONFIG")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one key, for example optim.lr=3e-4.", metavar="KEY=V"),
]
RunArgument = Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")]
_EXIT_USAGE = 2

app.command()(plan)
app.command()(calibrate)


@app.command()
def run(config: ConfigArgument, overrides: OverrideOption = None) -> None:
    """Run on this machine, or go on with a run that was stopped."""
    from jobs.local import LocalRun
    from jobs.monitor.app import watching
    from jobs.planning.gate import plan_gate
    from jobs.preflight import check_inputs
    from jobs.run_folder import RunFolder
    from toolkit.config_file import load_config

    console = Console()
    settings = load_config(config, overrides or [])
    check_inputs(settings)
    folder = RunFolder(Path(settings.run.folder))
    folder.create(settings)
    with folder.locked():
        if folder.done.exists():
            console.print(f"{folder.path} is done already")
        else:
            console.print(plan_gate(settings, is_here=True).text, markup=False, soft_wrap=True)
            folder.begin()
            with watching(folder, console) as refresh:
                outcome = LocalRun(settings, folder).run(refresh)
            if outcome.message:
                console.print(outcome.message, markup=False, soft_wrap=True)
            if outcome.exit_code:
                raise typer.Exit(outcome.exit_code)
    _print_result(folder.path, console)


@app.command()
def submit(
    config: ConfigArgument,
    overrides: OverrideOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch file, queue nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Queue it even if the plan says it cannot fit.")
    ] = False,
) -> None:
    """Queue one heterogeneous Slurm job, or go on with a run that has ended too early."""
    from jobs.monitor.app import follow
    from jobs.planning.gate import plan_gate
    from jobs.run_folder import RunFolder
    from jobs.slurm.submit import dry_run_text, submit_run
    from toolkit.config_file import load_config

    settings = load_config(config, overrides or [])
    if dry_run:
        print(dry_run_text(settings), end="")
        return
    gate = plan_gate(settings, is_here=False)
    if gate.fits is False and not force:
        raise InputError(f"{gate.text}; --force queues it all the same")
    Console().print(gate.text, markup=False, soft_wrap=True)
    folder = RunFolder(Path(settings.run.folder))
    Console().print(submit_run(settings, folder), soft_wrap=True)
    if wait:
        state = follow(folder, Console())
        _print_result(folder.path, Console())
        raise typer.Exit(0 if state.done else 1)


@app.command()
def sbatch(
    config: ConfigArgument,
    overrides: OverrideOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File, instead of one in the run folder.")
    ] = None,
) -> None:
    """Write a plain batch file that needs no submitit, and queue nothing."""
    from jobs.run_folder import RunFolder
    from jobs.slurm.batch import write_batch_file
    from toolkit.config_file import load_config

    settings = load_config(config, overrides or [])
    folder = RunFolder(Path(settings.run.folder))
    path = write_batch_file(settings, folder, output or folder.batch_file)
    Console().print(f"sbatch {shlex.quote(str(path))}", soft_wrap=True)


@app.command()
def status(folder: RunArgument) -> None:
    """Say where a run stands."""
    from jobs.monitor.state import read_state
    from jobs.monitor.view import summary
    from jobs.run_folder import RunFolder

    Console().print(summary(read_state(RunFolder(folder))))


@app.command()
def monitor(
    folder: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write it once, as a picture.")] = None,
) -> None:
    """Watch a run, wherever it runs; Ctrl-C leaves it running."""
    from jobs.monitor import app as views
    from jobs.monitor.state import read_state
    from jobs.monitor.view import summary
    from jobs.run_folder import RunFolder

    if svg is not None:
        views.write_svg(read_state(RunFolder(folder)), svg)
    elif as_json:
        print(views.as_json(read_state(RunFolder(folder))))
    elif once:
        Console().print(summary(read_state(RunFolder(folder))))
    else:
        with suppress(KeyboardInterrupt):
            views.follow(RunFolder(folder), Console())


@app.command()
def logs(
    folder: RunArgument,
    role: Annotated[str | None, typer.Option(help="student, teacher or batch; else all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they grow.")] = False,
) -> None:
    """Print the logs of a run, each line with its file's name."""
    from jobs.logs import print_logs
    from jobs.run_folder import RunFolder

    with suppress(KeyboardInterrupt):
        print_logs(RunFolder(folder), role or "", follow)


@app.command()
def cancel(folder: RunArgument) -> None:
    """End a run: its Slurm job, or its processes on this machine after a checkpoint."""
    from jobs.cancel import cancel_run
    from jobs.run_folder import RunFolder

    Console().print(cancel_run(RunFolder(folder)), soft_wrap=True)


teachers = typer.Typer(help="The teachers of a run that goes on.", no_args_is_help=True)
app.add_typer(teachers, name="teachers")


@teachers.command("add")
def add_teachers(
    folder: RunArgument,
    nodes: Annotated[int, typer.Option(help="Nodes of teachers to add.", min=1)] = 1,
) -> None:
    """Queue a further Slurm job whose teachers join the run."""
    from jobs.run_folder import RunFolder
    from jobs.slurm.submit import submit_teachers

    Console().print(submit_teachers(RunFolder(folder), nodes), soft_wrap=True)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN_A")],
    second: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN_B")],
    tolerance: Annotated[
        float, typer.Option(help="Largest difference that still counts as equal.", min=0.0)
    ] = 0.0,
) -> None:
    """Compare losses and final weights of two runs; exit code 1 if they differ by more."""
    from jobs.monitor.view import comparison_table
    from jobs.run_folder import RunFolder
    from toolkit.training.compare import compare_runs

    folders = RunFolder(first), RunFolder(second)
    comparison, pairs = compare_runs(
        (folders[0].metrics_file("student"), folders[1].metrics_file("student")),
        (folders[0].checkpoints, folders[1].checkpoints),
    )
    Console().print(comparison_table(comparison, pairs, tolerance))
    raise typer.Exit(0 if comparison.within(tolerance) else 1)


@app.command()
def prepare(
    inputs: Annotated[
        list[Path], typer.Argument(help="Text, JSONL or parquet files.", metavar="FILE...")
    ],
    tokenizer: Annotated[Path, typer.Option(help="Hugging Face folder with a tokenizer.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Token file to write (.bin).")],
    text_key: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
    eos_token: Annotated[
        str | None, typer.Option(help="End-of-text token, where the tokenizer names none.")
    ] = None,
) -> None:
    """Turn text into a token file."""
    from toolkit.data.prepare import prepare as prepare_tokens

    made = prepare_tokens(inputs, tokenizer, output, text_key=text_key, eos_token=eos_token)
    Console().print(
        f"{output}: {made.num_documents} documents, {made.num_tokens} tokens, {made.dtype}"
    )


@app.command()
def export(
    folder: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
) -> None:
    """Write the student of a run's newest checkpoint as a Hugging Face folder."""
    from jobs.export import export_run
    from jobs.run_folder import RunFolder

    checkpoint = export_run(RunFolder(folder), output)
    Console().print(f"{output}: the student of {checkpoint}", soft_wrap=True)


@app.command(hidden=True)
def role(
    name: Annotated[str, typer.Argument(help="teacher or student")],
    folder: Annotated[Path, typer.Option("--run", help="Run folder.")],
    rank: Annotated[int, typer.Option(help="Which one of its role.")] = 0,
    parent: Annotated[
        int | None, typer.Option(help="End when this process, the parent, has ended.")
    ] = None,
    shift: Annotated[
        int | None, typer.Option(help="Take the rank from Slurm's global rank, shifted by this.")
    ] = None,
) -> None:
    """Be one process of a run."""
    from jobs.processes import end, end_with_parent

    gc.disable()  # until all is imported: most of it stays to the end
    if shift is not None:
        from jobs.slurm.task import run_task

        end(run_task(name, folder, shift))
    if parent is not None:
        end_with_parent(parent)
    from jobs.roles import run_role

    end(run_role(name, rank, folder))


def _print_result(folder: Path, console: Console) -> None:
    from jobs.monitor.view import result_table
    from jobs.run_folder import RunFolder

    results = RunFolder(folder).results()
    if results:
        console.print(result_table(results))
    console.print(f"run folder: {folder}", soft_wrap=True)


def main() -> None:
    """Run the command line; the user's mistakes end it with one message and exit code 2."""
    try:
        app()
    except InputError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(_EXIT_USAGE)
