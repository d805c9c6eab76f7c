"""Top-1 agreement in shards against full logits."""

from dataclasses import replace

import pytest
import torch
from loss_cases import make_case

from toolkit.errors import InputError
from toolkit.losses.agreement import top1_agreement
from toolkit.models.heads import LMHead


def agreement(case, window_rows, shard_columns):
    count = top1_agreement(
        case.student_hidden,
        case.student_head,
        case.teacher_hidden,
        case.teacher_head,
        window_rows=window_rows,
        shard_columns=shard_columns,
    )
    assert count.dtype == torch.int64
    return int(count)


@pytest.mark.parametrize(("window_rows", "shard_columns"), [(1, 2), (7, 3), (64, 64)])
def test_agrees_with_full_logits(window_rows, shard_columns):
    case = make_case(97, 8, scale=0.5, softcap=4.0)
    student = case.student_head.logits(case.student_hidden).argmax(1)
    teacher = case.teacher_head.logits(case.teacher_hidden).argmax(1)
    expected = int((student == teacher).sum())
    assert 0 < expected < 97
    assert agreement(case, window_rows, shard_columns) == expected


@pytest.mark.parametrize("shard_columns", [1, 2, 3, 5])
@pytest.mark.parametrize(("first", "second", "expected"), [(1, 4, 1), (0, 4, 0)])
def test_lowest_token_wins_ties(first, second, expected, shard_columns):
    one = torch.ones(1, 1)
    tied, single = torch.zeros(5, 1), torch.zeros(5, 1)
    tied[[first, second]] = 3.0
    single[1] = 3.0
    case = replace(
        make_case(1, 5),
        student_hidden=one,
        student_head=LMHead(tied),
        teacher_hidden=one,
        teacher_head=LMHead(single),
    )
    assert agreement(case, 1, shard_columns) == expected


def test_no_tokens():
    assert agreement(make_case(4, 8).rows(slice(0, 0)), 4, 4) == 0


def test_different_vocabularies():
    case = make_case(4, 8)
    with pytest.raises(InputError, match="vocabulary of 8, the teacher's of 6"):
        agreement(replace(case, teacher_head=LMHead(torch.zeros(6, 48))), 4, 4)
