"""The vocabulary split over the ranks of a group: as if one rank had all of it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from loss_cases import DIVERGENCES, LAYOUTS, fused, make_case, options_for, relative
from loss_ranks import run_ranks

from toolkit.errors import InputError
from toolkit.losses.distillation import LMHead, distillation_loss

CUTS = {2: (0, 400, 1003), 3: (0, 1, 700, 1003)}
"""Where the parts of the vocabulary begin, and where it ends."""
CHOICES = [
    (divergence, layout) for divergence in DIVERGENCES for layout in (LAYOUTS[1], LAYOUTS[-1])
]


def case_and_options(divergence, layout):
    case = make_case(weighted=True, softcap=6.0)
    options = options_for(divergence, temperature=1.7, ce_weight=0.3, z_loss=0.01, **layout)
    return case, options


def part_of(case, columns):
    def cut(head):
        return LMHead(head.weight[columns], head.bias[columns], head.scale, head.softcap)

    return replace(case, student_head=cut(case.student_head), teacher_head=cut(case.teacher_head))


def on_rank(rank, cuts):
    """Return loss, sums and gradients of every choice, from this rank's part of the vocabulary."""
    found = []
    for choice in CHOICES:
        case, options = case_and_options(*choice)
        part = part_of(case, slice(cuts[rank], cuts[rank + 1]))
        found.append(fused(part, options, vocab_group=dist.group.WORLD))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_parts_make_a_whole(size, tmp_path):
    on_ranks = run_ranks(on_rank, size, tmp_path, CUTS[size])
    for choice, *found in zip(CHOICES, *on_ranks, strict=True):
        sums, gradients = fused(*case_and_options(*choice))
        for other, _ in found:
            for actual, expected in zip(other, sums, strict=True):
                actual, expected = (torch.as_tensor(part).item() for part in (actual, expected))
                assert actual == pytest.approx(expected, rel=1e-6)
        hidden, *heads = zip(*(gradients for _, gradients in found), strict=True)
        assert all(torch.equal(other, hidden[0]) for other in hidden)
        for actual, expected in zip((hidden[0], *map(torch.cat, heads)), gradients, strict=True):
            assert relative(actual, expected) < 1e-6


def with_other_labels(rank):
    case, options = case_and_options("jsd", LAYOUTS[1])
    part = part_of(case, slice(500 * rank, 500 * rank + 500))
    labels = torch.where(part.labels >= 0, rank, part.labels)
    heads = (part.student_head, part.teacher_hidden, part.teacher_head)
    with pytest.raises(InputError, match="give all of them the same tokens") as error:
        distillation_loss(
            part.student_hidden, *heads, labels, options, vocab_group=dist.group.WORLD
        )
    return str(error.value)


def test_ranks_with_other_tokens_are_refused(tmp_path):
    texts = run_ranks(with_other_labels, 2, tmp_path)
    assert texts[0] == texts[1]
