"""Which strategy, in which sizes: what fits a memory budget.

Shapes: T tokens, N of them labelled, R rows of a window, S columns of a shard, Hs and Ht hidden
sizes of student and teacher, V vocabulary.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import InputError

Strategy = Literal["windows", "recompute"]

MIN_ROWS = 256
"""Windows of fewer rows read and write the gradient of the head too often to be chosen."""
MIN_COLUMNS = 256
"""Shards of fewer columns make the matrix products too slow to be chosen."""
MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """How the logits are cut: `windows` keeps R x V of them at a time, `recompute` N x S."""

    strategy: Strategy
    window_rows: int
    """R; N with `recompute`."""
    shard_columns: int
    """S."""


@dataclass(frozen=True)
class Sizes:
    """What the memory of a call depends on.

    Attributes:
        num_tokens: T.
        num_rows: N.
        vocab_size: V.
        hidden_sizes: Hs and Ht.
        itemsizes: bytes of a number of student and teacher.
        sum_itemsize: bytes of a number of the statistics.
        rounds_products: whether products in the narrow type are made apart, then widened and added.
        own_weight_grad: whether a gradient of the head is made, not added to a given buffer.
        workspace_bytes: what the row kernels take.
    """

    num_tokens: int
    num_rows: int
    vocab_size: int
    hidden_sizes: tuple[int, int]
    itemsizes: tuple[int, int]
    sum_itemsize: int
    rounds_products: bool
    own_weight_grad: bool
    workspace_bytes: int


def transient_bytes(plan: Plan, sizes: Sizes) -> int:
    """Return the most memory that a call takes at a time, above its inputs and gradients.

    Vectors of N or V numbers are left out, but for the 17 numbers of a row's state and results.
    """
    rows, columns = plan.window_rows, plan.shard_columns
    hidden, item, sum_item = sizes.hidden_sizes[0], sizes.itemsizes[0], sizes.sum_itemsize
    tile_columns = sizes.vocab_size if plan.strategy == "windows" else columns
    num_bytes = rows * (tile_columns * sum(sizes.itemsizes) + 17 * sum_item)
    if sizes.num_rows < sizes.num_tokens:  # labelled rows are copied together
        pairs = zip(sizes.hidden_sizes, sizes.itemsizes, strict=True)
        num_bytes += rows * sum(size * itemsize for size, itemsize in pairs)
    num_bytes += rows * hidden * (item if plan.strategy == "windows" else sum_item)  # gradient
    steps = [sizes.workspace_bytes]
    is_summed = not sizes.own_weight_grad or rows < sizes.num_rows  # the head's gradient
    if item < sum_item and sizes.rounds_products:
        summed = max(columns * is_summed, 0 if plan.strategy == "windows" else rows)
        steps.append(summed * hidden * (item + sum_item))
    if item < sum_item and sizes.own_weight_grad and is_summed:
        # The sum for the head is there until the end, its gradient from the end on.
        weight = sizes.vocab_size * hidden
        return max(num_bytes + max(steps) + weight * (sum_item - item), weight * sum_item)
    return num_bytes + max(steps)


def make_plan(
    sizes: Sizes,
    *,
    strategy: Literal["auto", "windows", "recompute"],
    budget_mib: int,
    window_rows: int | None,
    shard_columns: int,
) -> Plan:
    """Return the plan that fits the budget, or the windows that are asked for.

    Args:
        sizes: of the call.
        strategy: `auto` takes windows of as many rows as fit, if 256 (or all) do, else `recompute`.
        budget_mib: limit of `transient_bytes`.
        window_rows: R, whatever the budget; None for as many as fit.
        shard_columns: largest S; with `recompute` as many as fit.

    Raises:
        InputError: nothing fits the budget.
    """
    num_rows, columns = max(sizes.num_rows, 1), min(shard_columns, sizes.vocab_size)
    if window_rows is not None:
        return Plan("windows", min(window_rows, num_rows), columns)

    def windows(size: int) -> Plan:
        return Plan("windows", size, columns)

    def recompute(size: int) -> Plan:
        return Plan("recompute", num_rows, size)

    budget = budget_mib * MIB
    if strategy != "recompute":
        size = _largest(windows, num_rows, sizes, budget)
        if size >= (1 if strategy == "windows" else min(MIN_ROWS, num_rows)):
            return windows(-(-num_rows // -(-num_rows // size)))  # as many windows, but even
    if strategy != "windows":
        size = _largest(recompute, columns, sizes, budget)
        if size >= min(MIN_COLUMNS, columns):
            return recompute(size)
    smallest = windows(1) if strategy == "windows" else recompute(min(MIN_COLUMNS, columns))
    needed = -(-transient_bytes(smallest, sizes) // MIB)
    raise InputError(
        f"memory_budget_mib = {budget_mib} is too small for {num_rows} tokens with strategy ="
        f" {strategy!r}: give at least {needed}, or fewer tokens at a time"
    )


def _largest(plan: Callable[[int], Plan], limit: int, sizes: Sizes, budget: int) -> int:
    """Return the largest size up to a limit whose plan fits the budget, or 0.

    The limit goes first: a single window may fit where a smaller one does not, since it needs no
    sum of the head's gradient.
    """
    if transient_bytes(plan(limit), sizes) <= budget:
        return limit
    return bisect_right(
        range(1, limit), budget, key=lambda size: transient_bytes(plan(size), sizes)
    )
