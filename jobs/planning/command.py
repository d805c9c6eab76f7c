"""The command `plan`. Heavy imports stand inside, so that help comes at once."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from toolkit.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

_SVG_WIDTH = 120
_AUTO = "auto"
_OF_RUNS = {
    *("config", "overrides", "check", "gpu", "network", "hardware"),
    *("coefficients", "coefficient", "as_json", "svg"),
}
"""Parameters that go with a run."""

ModelOption = Annotated[
    str | None, typer.Option(help="Bundled model, config.json, or folder.", metavar="MODEL")
]
HardwareOption = Annotated[Path | None, typer.Option(help="TOML with further GPUs and networks.")]


def plan(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="Configuration of a run, instead of models.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key of CONFIG.", metavar="KEY=V")
    ] = None,
    teacher: ModelOption = None,
    student: ModelOption = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of all nodes; by default cluster.gpu, or h100-80.")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Of a node: 8x400 (ports x gigabits), 1x100tcp, infiniband-ndr, ..."),
    ] = None,
    nodes_student: Annotated[int, typer.Option(help="Nodes that train.", min=1)] = 1,
    nodes_teacher: Annotated[int, typer.Option(help="Nodes of the teacher.", min=0)] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Of a micro-batch on a rank.", min=1)] = 8192,
    sequence_length: Annotated[
        int | None, typer.Option(help="By default a micro-batch is one sequence.", min=1)
    ] = None,
    micro_batches: Annotated[int, typer.Option(help="Of a step, on a rank.", min=1)] = 1,
    sharding: Annotated[str, typer.Option(help="ddp, zero1, zero2, zero3, fsdp2.")] = "fsdp2",
    recompute: Annotated[
        str, typer.Option(help="none, selective, full; auto is the least that fits.")
    ] = _AUTO,
    kernels: Annotated[str, typer.Option(help="Norms and gated units: fused, eager.")] = "fused",
    tensor_parallel: Annotated[int, typer.Option(min=1)] = 1,
    expert_parallel: Annotated[int, typer.Option(min=1)] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1)] = 1,
    context_parallel: Annotated[int, typer.Option(min=1)] = 1,
    full_loss: Annotated[
        str, typer.Option(help="Loss of the layout with full logits: fp32, bf16, jsd.")
    ] = "fp32",
    loss_budget_mib: Annotated[int, typer.Option(help="loss.memory_budget_mib.", min=1)] = 1024,
    vocab_shards: Annotated[int, typer.Option(help="Ranks that share the heads.", min=1)] = 1,
    ring_slots: Annotated[int, typer.Option(help="ring.slots and spare ones.", min=1)] = 8,
    trained_share: Annotated[float, typer.Option(help="Share of tokens with a label.")] = 1.0,
    hardware: HardwareOption = None,
    coefficients: Annotated[Path | None, typer.Option(help="TOML with coefficients.")] = None,
    coefficient: Annotated[
        list[str] | None, typer.Option(help="One coefficient.", metavar="NAME=VALUE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write it as a picture.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Put the plan of a run beside what it measured.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Rates of nodes in all, for example nodes=1..16.")
    ] = None,
) -> None:
    """Say before queueing what fits, how fast it is and what limits it: three layouts."""
    from jobs.planning import report, view
    from jobs.run_folder import RunFolder
    from toolkit.config_file import load_config
    from toolkit.planner.coefficients import read_coefficients
    from toolkit.planner.facts import read_model
    from toolkit.planner.hardware import find_gpu, find_network
    from toolkit.planner.job import Job

    if config is not None or check is not None:
        _refuse_all_but(context, _OF_RUNS)
    is_auto = config is None and recompute == _AUTO
    numbers = read_coefficients(coefficients, coefficient or [])
    if check is not None:
        run = RunFolder(check)
        job = report.job_of_config(run.load(), gpu, network, hardware, numbers)
        comparisons = report.check_run(run, job)
        if as_json:
            print(json.dumps({item.name: vars(item) for item in comparisons}, indent=1))
        else:
            _show(view.check_view(comparisons), svg)
        return
    if config is not None:
        settings = load_config(config, overrides or [])
        job = report.job_of_config(settings, gpu, network, hardware, numbers)
        sections = settings.student, settings.teacher
        folders = [section.tokenizer or section.path for section in sections]
    elif teacher is None or student is None:
        raise InputError("give a configuration, or --teacher and --student")
    else:
        folders = [student, teacher]
        job = Job(
            student=read_model(student),
            teacher=read_model(teacher),
            gpu=find_gpu(gpu or report.DEFAULT_GPU, hardware),
            network=find_network(network or report.DEFAULT_NETWORK, hardware),
            student_gpus=nodes_student * gpus_per_node,
            teacher_gpus=nodes_teacher * gpus_per_node,
            node_gpus=gpus_per_node,
            tokens=tokens,
            sequence_length=sequence_length or tokens,
            micro_batches=micro_batches,
            sharding=sharding,  # type: ignore[arg-type]
            recompute="full" if is_auto else recompute,  # type: ignore[arg-type]
            kernels=kernels,  # type: ignore[arg-type]
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            pipeline_parallel=pipeline_parallel,
            context_parallel=context_parallel,
            full_loss=full_loss,  # type: ignore[arg-type]
            memory_budget_mib=loss_budget_mib,
            vocab_shards=vocab_shards,
            host_slots=ring_slots,
            trained_share=trained_share,
            coefficients=numbers,
        )
    tokenizers = [Path(folder) for folder in folders if folder is not None]
    if sweep is not None:
        rows = report.sweep(job, report.sweep_range(sweep), choose=is_auto)
        _show(view.sweep_view(rows), svg)
        return
    found = report.make_report(job, choose=is_auto, tokenizers=tokenizers)
    if as_json:
        print(report.as_json(found))
    else:
        _show(view.report_view(found), svg)


def calibrate(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="TOML to write.")],
    gpu: Annotated[str | None, typer.Option(help="GPU of the runs.")] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Over which their teachers wrote; by default cluster.network."),
    ] = None,
    hardware: HardwareOption = None,
) -> None:
    """Fit the planner's estimates to what runs measured, for `plan --coefficients`."""
    import tomli_w

    from jobs.planning import report
    from jobs.run_folder import RunFolder
    from toolkit.planner.coefficients import Coefficients
    from toolkit.planner.measured import calibrated, merged
    from toolkit.planner.run import layout_of
    from transport.rendezvous import write_atomically

    runs = []
    for folder in map(RunFolder, folders):
        config = folder.load()
        job = report.job_of_config(config, gpu, network, hardware, Coefficients())
        measured, name = report.measured_of(folder, job), network or config.cluster.network
        found = calibrated(job, layout_of(config), measured, knows_network=name is not None)
        runs.append(found)
    text = tomli_w.dumps(merged(runs))
    write_atomically(output, text)
    print(text, end="")


def _refuse_all_but(context: typer.Context, names: set[str]) -> None:
    """Refuse options that would not be heard, for the run says what they say."""
    for name in context.params.keys() - names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise InputError(
                f"--{option} goes with --teacher and --student, not with a run: change its"
                " configuration instead, with --set"
            )


def _show(content: "RenderableType", svg: Path | None) -> None:
    from io import StringIO

    from transport.rendezvous import write_atomically

    if svg is None:
        Console().print(content)
        return
    console = Console(record=True, width=_SVG_WIDTH, file=StringIO(), force_terminal=True)
    console.print(content)
    write_atomically(svg, console.export_svg(title="disaggkd plan"))
