"""Which plan fits a budget, and whether the memory is as foreseen."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_cases import DIVERGENCES, RECOMPUTE, loss_of, make_case, options_for, with_leaves
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.errors import InputError
from toolkit.losses import rows
from toolkit.losses.products import adds_unrounded
from toolkit.planner.loss_plan import MIB, Plan, Sizes, make_plan, transient_bytes

FP32, BF16 = torch.float32, torch.bfloat16
SIZES = Sizes(
    num_tokens=4096,
    num_rows=4096,
    vocab_size=32000,
    hidden_sizes=(1024, 2048),
    itemsizes=(4, 4),
    sum_itemsize=4,
    rounds_products=True,
    own_weight_grad=True,
    workspace_bytes=0,
)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def peak_bytes(function):
    """Return the most memory that a function held at a time, its results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert results
    return peak


def plan_for(sizes, budget_mib, strategy="auto", window_rows=None):
    return make_plan(
        sizes,
        strategy=strategy,
        budget_mib=budget_mib,
        window_rows=window_rows,
        shard_columns=16384,
    )


@pytest.mark.parametrize("is_given", [False, True], ids=["own buffer", "given buffer"])
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, BF16)], ids=str)
@pytest.mark.parametrize(
    "layout",
    [{"window_rows": 32}, {"window_rows": 160}, {**RECOMPUTE, "shard_columns": 500}],
    ids=["windows", "one window", "recompute"],
)
def test_memory_is_as_foreseen(monkeypatch, layout, dtypes, is_given):
    monkeypatch.setitem(rows._BLOCK, "cpu", 2**14)  # fewer would hide in what is left out
    case = make_case(200, 4001, (64, 96), dtypes, bias=False, softcap=5.0, weighted=True)
    leaves = with_leaves(case, hidden=True, weight=True)
    buffer = torch.zeros(4001, 64) if is_given else None
    options = options_for("jsd", **{"shard_columns": 1000, "backend": "torch"} | layout)

    def gradients():
        loss_of(leaves, options, weight_grad=buffer).loss.backward()
        weight_grad = leaves.student_head.weight.grad
        return leaves.student_hidden.grad.nbytes + (0 if is_given else weight_grad.nbytes)

    results = []
    peak = peak_bytes(lambda: results.append(gradients()) or results)
    columns = options.shard_columns
    plan = Plan("windows", options.window_rows or 160, columns)
    if options.strategy == "recompute":
        plan = Plan("recompute", 160, columns)
    sizes = Sizes(
        num_tokens=200,
        num_rows=160,
        vocab_size=4001,
        hidden_sizes=(64, 96),
        itemsizes=tuple(dtype.itemsize for dtype in dtypes),
        sum_itemsize=4,
        rounds_products=not adds_unrounded(case.student_hidden),
        own_weight_grad=not is_given,
        workspace_bytes=rows.workspace_bytes(case.student_hidden),
    )
    measured = peak - results[0]
    assert 0.75 * transient_bytes(plan, sizes) < measured < 1.02 * transient_bytes(plan, sizes)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "vocab", "layout"),
    [
        (1024, 20032, {"window_rows": 1024}),
        (1024, 16000, {"window_rows": 512}),
        (2048, 16000, RECOMPUTE),
        (4096, 40064, RECOMPUTE),
    ],
)
def test_planned_peak_is_within_a_twentieth(tokens, vocab, layout, dtype):
    """Of sizes as they are used; a product in bfloat16 takes 2 MB for itself on some processors."""
    case = make_case(tokens, vocab, (128, 192), (dtype, dtype), bias=False)
    case = replace(case, labels=torch.arange(tokens))
    leaves = with_leaves(case, hidden=True, weight=True)
    options = options_for("forward_kl", **{"shard_columns": 4096} | layout)
    results = []

    def gradients():
        loss_of(leaves, options).loss.backward()
        return leaves.student_hidden.grad.nbytes + leaves.student_head.weight.grad.nbytes

    peak = peak_bytes(lambda: results.append(gradients()) or results)
    plan = Plan(options.strategy, options.window_rows or tokens, options.shard_columns)
    if plan.strategy == "auto":
        plan = replace(plan, strategy="windows")
    sizes = Sizes(
        num_tokens=tokens,
        num_rows=tokens,
        vocab_size=vocab,
        hidden_sizes=(128, 192),
        itemsizes=(dtype.itemsize, dtype.itemsize),
        sum_itemsize=4,
        rounds_products=not adds_unrounded(case.student_hidden),
        own_weight_grad=True,
        workspace_bytes=0,
    )
    assert transient_bytes(plan, sizes) == pytest.approx(peak - results[0], rel=0.05)


def test_windows_fill_the_budget_evenly():
    for budget_mib in (100, 200, 500):
        plan = plan_for(SIZES, budget_mib)
        assert plan.strategy == "windows"
        assert transient_bytes(plan, SIZES) <= budget_mib * MIB
        num_windows = -(-4096 // plan.window_rows)
        assert plan.window_rows == -(-4096 // num_windows)
        fewer = replace(plan, window_rows=-(-4096 // (num_windows - 1)))
        assert transient_bytes(fewer, SIZES) > budget_mib * MIB
    assert plan_for(SIZES, 1100).window_rows == 4096


def test_recomputes_where_windows_would_be_small():
    small = plan_for(SIZES, 40)
    assert small.strategy == "recompute"
    assert transient_bytes(small, SIZES) <= 40 * MIB
    wider = replace(small, shard_columns=small.shard_columns + 1)
    assert transient_bytes(wider, SIZES) > 40 * MIB
    assert plan_for(SIZES, 40, "windows").strategy == "windows"
    assert plan_for(SIZES, 1000, "recompute").shard_columns == 16384


def test_one_window_spares_the_wide_gradient_of_the_head():
    sizes = replace(SIZES, num_tokens=300, num_rows=300, itemsizes=(2, 2))
    one = transient_bytes(Plan("windows", 300, 16384), sizes)
    assert one < transient_bytes(Plan("windows", 299, 16384), sizes)
    assert plan_for(sizes, -(-one // MIB)).window_rows == 300


def test_windows_that_are_asked_for_need_no_budget():
    assert plan_for(SIZES, 1, window_rows=1000) == Plan("windows", 1000, 16384)
    assert plan_for(SIZES, 1, window_rows=10**6) == Plan("windows", 4096, 16384)


@pytest.mark.parametrize("strategy", ["auto", "windows", "recompute"])
def test_budget_that_nothing_fits_says_what_would(strategy):
    sizes = replace(SIZES, itemsizes=(2, 2))
    with pytest.raises(InputError, match=r"memory_budget_mib = 1 .* give at least (\d+)") as raised:
        plan_for(sizes, 1, strategy)
    enough = int(str(raised.value).split("give at least ")[1].split(",")[0])
    plan_for(sizes, enough, strategy)
    with pytest.raises(InputError):
        plan_for(sizes, enough - 1, strategy)


@pytest.mark.parametrize("layout", [{"window_rows": 8}, RECOMPUTE], ids=["windows", "recompute"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_full_logits_never_exist(divergence, layout):
    tokens, vocab = 64, 1003
    case = make_case(tokens, vocab, hidden=(4, 4), dtypes=(BF16, BF16))
    leaves = with_leaves(case, hidden=True, weight=True, bias=True)
    options = options_for(divergence, **{"shard_columns": 200} | layout)
    with LargestTensor() as mode:
        loss_of(leaves, options).loss.backward()
    labelled = int((case.labels != -100).sum())
    logits = labelled * 200 if layout is RECOMPUTE else 8 * vocab
    assert mode.elements <= max(logits, vocab * 4) < labelled * vocab


def test_frozen_head_has_no_gradient_buffer():
    # So wide a head that its gradient would be the largest tensor by far.
    case = make_case(8, 1003, hidden=(64, 64))
    frozen, trained = with_leaves(case, hidden=True), with_leaves(case, hidden=True, weight=True)
    options = options_for("forward_kl", window_rows=2, shard_columns=100)
    largest = []
    for leaves in (frozen, trained):
        with LargestTensor() as mode:
            loss_of(leaves, options)
        largest.append(mode.elements)
    assert largest == [64 * 100, 64 * 1003]


def test_windows_share_the_buffers_of_their_logits(monkeypatch):
    made = []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args: made.append(args[1:]) or new_empty(*args)
    )
    loss_of(make_case(), options_for("jsd", window_rows=2, shard_columns=502))
    assert made == [(2, 1003)] * 2


def test_new_memory_is_asked_for_in_huge_pages():
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this Linux has no transparent huge pages")
    tile = rows.Tile.empty(torch.empty(1), torch.empty(1), 1024, 2048)
    for logits in (tile.student, tile.teacher):
        middle, flags = logits.data_ptr() + logits.nbytes // 2, ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                is_here = int(found[1], 16) <= middle < int(found[2], 16)
            elif is_here and line.startswith("VmFlags:"):
                flags = line
        assert " hg" in flags
