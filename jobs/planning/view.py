"""From the planner's report to what the terminal shows: pure functions."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jobs.planning.report import REMEDIES, Report, SweepRow
from toolkit.planner.hardware import GIB
from toolkit.planner.measured import Comparison
from toolkit.planner.memory import LAYOUTS, Layout
from toolkit.planner.plans import Plan
from toolkit.planner.verdict import NAMES

_MIB = 2**20
_BAR_WIDTH = 56
_RATE_WIDTH = 24
_COLOURS = ("cyan", "blue", "magenta", "yellow", "green", "red")


def report_view(report: Report) -> RenderableType:
    """Return the whole report."""
    parts: list[RenderableType] = [_title(report), _layouts(report), _bars(report)]
    if report.teachers.replica_gpus is not None:
        parts.append(_teachers(report))
    parts += [
        Text(finding.text, style="bold red" if finding.is_blocking else "dim")
        for finding in report.findings
    ]
    parts += [
        Text(f"{NAMES[layout]} would fit with: {'; or '.join(changes[:REMEDIES]) or 'nothing'}")
        for layout, changes in report.remedies.items()
    ]
    parts.append(Text(report.verdict, style="bold"))
    return Group(*parts)


def sweep_view(rows: Sequence[SweepRow]) -> RenderableType:
    """Return a row for each number of nodes, with bars for the rates."""
    table = Table(title="tokens/s of all GPUs of some nodes")
    table.add_column("nodes", justify="right")
    for layout in LAYOUTS:
        table.add_column(NAMES[layout])
    fastest = max(
        (plan.tokens_per_s for row in rows for plan in row.plans.values() if plan.fits), default=1.0
    )
    for row in rows:
        table.add_row(str(row.nodes), *(_rate(row, layout, fastest) for layout in LAYOUTS))
    return table


def check_view(comparisons: Sequence[Comparison]) -> RenderableType:
    """Return the plan of a run beside what it measured."""
    table = Table()
    for column in ("", "planned", "measured", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for item in comparisons:
        ratio = f"{item.planned / item.measured:.3f}" if item.measured > 0 else ""
        planned, measured = (_quantity(size, item.unit) for size in (item.planned, item.measured))
        table.add_row(item.name, planned, measured, ratio)
    return table


def _quantity(value: float, unit: str) -> str:
    match unit:
        case "":
            return f"{value:.1%}"
        case "B" if value >= _MIB:
            return f"{value / _MIB:,.1f} MiB"
        case "B":
            return f"{value:,.0f} B"
        case _:
            return f"{value:,.4g} {unit}"


def _rate(row: SweepRow, layout: Layout, fastest: float) -> Text:
    plan = row.plans.get(layout)
    if plan is None or not plan.fits:
        needed = "" if plan is None else f": {_gib(plan.memory.peak)} GiB"
        return Text(f"does not fit{needed}", style="red")
    bar = "█" * max(1, round(plan.tokens_per_s / fastest * _RATE_WIDTH))
    split = ""
    if layout == "disaggregated":
        split = f" {plan.student_gpus} + {row.teacher_gpus}"
    return Text(f"{plan.tokens_per_s:,.0f}{split}\n") + Text(bar, style="cyan")


def _title(report: Report) -> Text:
    job = report.job
    return Text(
        f"{job.teacher.name} teaches {job.student.name}: {job.student_gpus} + {job.teacher_gpus}"
        f" x {job.gpu.name}, network {job.network} a node, {job.tokens:,} tokens a micro-batch and"
        f" rank, {job.sharding}",
        style="bold",
    )


def _layouts(report: Report) -> Table:
    table = Table()
    table.add_column("GiB of a student rank")
    plans = [report.plans[layout] for layout in LAYOUTS]
    for plan in plans:
        table.add_column(NAMES[plan.layout], justify="right")
    for kind in ("static", "moments"):
        names = dict.fromkeys(name for plan in plans for name in getattr(plan.memory, kind))
        for name in names:
            sizes = [getattr(plan.memory, kind).get(name) for plan in plans]
            label = name if kind == "static" else f"at {name}"
            table.add_row(label, *("" if size is None else _gib(size) for size in sizes))
        table.add_section()
    usable = report.job.gpu.usable_bytes(report.job.coefficients)
    table.add_row("peak", *(_peak(plan) for plan in plans))
    table.add_row("of usable", *([_gib(usable)] * len(plans)))
    table.add_row("largest micro-batch", *(f"{plan.max_tokens:,}" for plan in plans))
    table.add_section()
    table.add_row("GPUs that train", *(str(plan.student_gpus) for plan in plans))
    table.add_row("teacher sharded over", *(str(plan.teacher_shards or "") for plan in plans))
    table.add_row("recompute", *(plan.recompute for plan in plans))
    table.add_row("tokens/s", *(f"{plan.tokens_per_s:,.0f}" for plan in plans))
    table.add_row("step, s", *(f"{plan.step_s:.2f}" for plan in plans))
    table.add_row("limit", *(plan.bound for plan in plans))
    for name in ("teacher", "own"):
        sizes = [getattr(plan, f"{name}_ingress") for plan in plans]
        whose = "teacher's" if name == "teacher" else "student's"
        table.add_row(f"{whose} into a node, GB/s", *(f"{size / 1e9:.3f}" for size in sizes))
    table.add_row("of its network", *(f"{plan.network_share:.1%}" for plan in plans))
    return table


def _peak(plan: Plan) -> Text:
    return Text(
        f"{_gib(plan.memory.peak)} {'fits' if plan.fits else 'does not fit'}",
        style="green" if plan.fits else "red",
    )


def _bars(report: Report) -> Table:
    """Return the peaks as bars; the mark stands where memory ends."""
    usable = report.job.gpu.usable_bytes(report.job.coefficients)
    widest = max(usable, *(plan.memory.peak for plan in report.plans.values()))
    table = Table.grid(padding=(0, 1))
    shown: dict[str, str] = {}
    for plan in report.plans.values():
        bar = Text()
        moment = {f"at {plan.memory.moment}": plan.memory.moments[plan.memory.moment]}
        for name, size in (plan.memory.static | moment).items():
            colour = shown.setdefault(name, _COLOURS[len(shown) % len(_COLOURS)])
            bar.append("█" * round(size / widest * _BAR_WIDTH), style=colour)
        end = round(usable / widest * _BAR_WIDTH)
        bar.append(" " * max(0, end - len(bar)))
        if len(bar) <= end:
            bar.append("│")
        else:
            bar.stylize("underline", end, len(bar))
        table.add_row(NAMES[plan.layout], bar)
    legend = Text()
    for name, colour in shown.items():
        legend.append("█ ", style=colour).append(f"{name}  ")
    table.add_row("", legend)
    return table


def _teachers(report: Report) -> Text:
    teachers, job = report.teachers, report.job
    assert teachers.memory is not None
    text = (
        f"GPUs of a teacher replica: {teachers.replica_gpus}, {_gib(teachers.memory.peak)} GiB"
        f" each; {teachers.needed_gpus} would keep the students busy with"
        f" {job.coefficients.spare_teacher - 1:.0%} to spare, given are {job.teacher_gpus}."
    )
    if teachers.ring is not None:
        text += f" Teachers are {teachers.ring.kappa:.2f} times as fast as the students: "
        text += (
            "a ring of any depth runs empty."
            if teachers.ring.slots is None
            else f"a ring of {teachers.ring.slots} slots lets them wait"
            f" {job.coefficients.waiting_share:.0%} of the time."
        )
    text += (
        f" A ring of {job.host_slots} slots pins {report.ring_bytes / GIB:.2f} GiB for each of the"
        f" {job.replicas} student ranks."
    )
    if report.break_even_tokens:
        text += (
            f" Hidden states are less traffic than gathering a sharded teacher once, up to"
            f" {report.break_even_tokens:,.0f} tokens of a micro-batch."
        )
    if report.split is not None:
        rate, students, taught = report.split
        text += (
            f" Of these {job.student_gpus + job.teacher_gpus} GPUs, {students} + {taught} would be"
            f" the best split: {rate:,.0f} tokens/s."
        )
    return Text(text)


def _gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:.1f}" if size >= 1 else f"{size:.3f}"
