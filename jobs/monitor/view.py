"""From a run's state to what the terminal shows: pure functions."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.monitor.state import RunState
from toolkit.training.metrics import Record

if TYPE_CHECKING:
    from toolkit.training.compare import Comparison

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48
_PROGRESS_WIDTH = 40
_COMPARED_STEPS = 8


def dashboard(state: RunState) -> RenderableType:
    """Return the live view of a run."""
    parts: list[RenderableType] = [_title(state)]
    if state.job is not None:
        parts.append(_job(state))
    parts += [Text(f"started again: {why}", style="yellow") for why in state.restarts]
    if state.last is not None:
        parts += [_progress(state), _figures(state)]
        if state.teachers:
            parts += [_teachers(state), _ring(state)]
        parts.append(Text(state.bottleneck, style="bold"))
    return Group(*parts)


def summary(state: RunState) -> RenderableType:
    """Return where a run stands: the live view, then how it ended."""
    parts = [dashboard(state)]
    if state.results:
        parts.append(result_table(state.results))
    if state.failure is not None:
        parts.append(Text(str(state.failure), style="red"))
    return Group(*parts)


def plain_line(state: RunState) -> str:
    """Return one line for output that is no terminal."""
    last = state.last
    if last is None:
        return state.phase
    return (
        f"{state.phase}: step {last['step']}/{last['steps']}  kd {last['kd']:.4f}  "
        f"ce {last['ce']:.4f}  {state.recent('tokens_per_s'):.0f} tokens/s  "
        f"waiting {state.waiting:.0%}"
    )


def result_table(results: dict[str, Any]) -> Table:
    """Return the evaluations before and after, on tokens that were held out."""
    table = Table(title="held-out tokens", title_justify="left")
    table.add_column("")
    rows = [("KD loss", "kd", "{:.4f}"), ("perplexity", "perplexity", "{:,.1f}")]
    rows.append(("top-1 agreement", "agreement", "{:.2%}"))
    for when in results:
        table.add_column(when, justify="right")
    for title, key, form in rows:
        table.add_row(title, *(form.format(values[key]) for values in results.values()))
    return table


def comparison_table(
    comparison: "Comparison", pairs: Sequence[tuple[Record, Record]], tolerance: float
) -> RenderableType:
    """Return some steps of both runs, and their largest differences."""
    table = Table("step", "loss A", "loss B", "difference")
    stride = max(1, -(-len(pairs) // _COMPARED_STEPS))
    for first, second in [*pairs[:-1:stride], pairs[-1]]:
        a, b = first["loss"], second["loss"]
        table.add_row(str(first["step"]), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.3g}")
    verdict = "within" if comparison.within(tolerance) else "NOT within"
    lines = (
        f"{comparison.num_steps} steps, largest difference of losses {comparison.loss:.3g} "
        f"(step {comparison.loss_step})\n"
        f"largest difference of final weights {comparison.weight:.3g} ({comparison.weight_name})\n"
        f"{verdict} the tolerance of {tolerance:g}"
    )
    return Group(table, Text(lines))


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` characters, each the mean of its share of the values."""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _title(state: RunState) -> Text:
    phase = "done" if state.done else "failed" if state.failure else state.phase
    return Text.assemble(("disaggkd ", "bold cyan"), state.path, "  ", (phase, "bold"))


def _job(state: RunState) -> Text:
    text = f"Slurm job {state.job}"
    if state.job_state is None:
        return Text(f"{text}: not in the queue")
    job = state.job_state
    reason = "" if job.reason in ("", "None") or job.state == "RUNNING" else f" ({job.reason})"
    return Text(f"{text}: {job.state}{reason}, {job.elapsed} elapsed, {job.left} left")


def _progress(state: RunState) -> Table:
    last = state.steps[-1]
    left = timedelta(seconds=round(state.remaining_s))
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        f"step {last['step']}/{last['steps']}",
        ProgressBar(total=last["steps"], completed=last["step"], width=_PROGRESS_WIDTH),
        f"{left} left" if last["step"] < last["steps"] else "",
    )
    return grid


def _figures(state: RunState) -> Table:
    last = state.steps[-1]
    table = Table("student", "", box=None, show_header=False, padding=(0, 1))
    curve = sparkline([record["kd"] for record in state.steps], _CURVE_WIDTH)
    table.add_row("KD loss", f"{last['kd']:.4f}  {curve}")
    table.add_row("CE loss", f"{last['ce']:.4f}")
    table.add_row("student", f"{state.recent('tokens_per_s'):,.0f} tokens/s")
    table.add_row("gradient", f"norm {last['grad_norm']:.3f}, learning rate {last['lr']:.2e}")
    return table


def _teachers(state: RunState) -> Table:
    table = Table("teacher", "capacity", "waits", "writes", "orders", box=None, padding=(0, 1))
    for teacher in state.teachers:
        table.add_row(
            str(teacher.index),
            f"{teacher.tokens_per_s:,.0f} tokens/s",
            f"{teacher.waiting:.0%}",
            f"{teacher.write_gb_per_s:.2f} GB/s",
            str(teacher.num_orders),
        )
    return table


def _ring(state: RunState) -> Text:
    ready, slots = state.steps[-1]["ring_ready"], state.config.ring.slots
    gauge = "■" * ready + "□" * (slots - ready)
    teachers = f"{state.steps[-1]['num_teachers']} teachers connected"
    return Text(
        f"ring {gauge} {ready}/{slots} ready, student waits {state.waiting:.0%}, {teachers}"
    )
