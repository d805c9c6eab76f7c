"""What the front door refuses, and what it says."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from loss_cases import loss_of, make_case, options_for

from toolkit.config import LossSection
from toolkit.errors import InputError
from toolkit.losses.divergences import Divergence
from toolkit.losses.options import LossOptions
from toolkit.models.heads import LMHead


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "tv"}, "divergence = 'tv': choose one of .* jsd, .* total_variation"),
        ({"beta": 0.0}, r"beta = 0.0 .* forward_kl \(beta 0\)"),
        ({"beta": 1.0}, r"beta = 1.0 .* reverse_kl \(beta 1\)"),
        ({"skew": 0.0}, "skew = 0.0 .* use divergence forward_kl or reverse_kl"),
        ({"skew": 1.0}, "skew = 1.0 must lie between 0 and 1"),
        ({"z_loss": -1.0}, "z_loss = -1.0 must be 0 or more"),
        ({"temperature": 0.0}, "temperature = 0.0 must be positive"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"kd_weight": -1.0}, "kd_weight = -1.0 must be 0 or more"),
        ({"ce_weight": float("inf")}, "ce_weight = inf"),
        ({"window_rows": 0}, "window_rows = 0 must be at least 1"),
        ({"shard_columns": -4}, "shard_columns = -4"),
        ({"memory_budget_mib": 0}, "memory_budget_mib = 0 must be at least 1"),
        ({"strategy": "chunks"}, "strategy = 'chunks': choose one of auto, windows, recompute"),
        ({"strategy": "recompute", "window_rows": 8}, "window_rows = 8 .* leave it out"),
    ],
)
def test_options(options, message):
    with pytest.raises(InputError, match=message):
        LossOptions(**{"divergence": "jsd"} | options)


def test_options_take_the_section_of_the_configuration():
    assert LossOptions(**LossSection().model_dump()) == LossOptions("forward_kl")
    assert get_args(LossSection.model_fields["divergence"].annotation) == get_args(Divergence)


def with_label(case, label):
    labels = case.labels.clone()
    labels[2] = label
    return replace(case, labels=labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: with_label(case, 1003), r"label 1003 .* \[0, 1003\).* ignore_index = -100"),
        (lambda case: with_label(case, -1), r"label -1 lies outside the vocabulary \[0, 1003\)"),
        (
            lambda case: replace(case, labels=case.labels[1:]),
            r"labels have shape \[22\] .* give \[23\]",
        ),
        (lambda case: replace(case, labels=case.labels.int()), r"dtype torch.int32"),
        (
            lambda case: replace(case, teacher_head=LMHead(torch.zeros(1000, 48))),
            "vocabulary of 1003, the teacher's of 1000",
        ),
        (
            lambda case: replace(case, teacher_hidden=case.teacher_hidden[:9]),
            "student has hidden states of 23 tokens, the teacher of 9",
        ),
        (
            lambda case: replace(case, teacher_hidden=case.student_hidden),
            r"teacher's hidden states have shape \[23, 32\]: its head needs \[tokens, 48\]",
        ),
        (
            lambda case: replace(case, student_hidden=case.student_hidden[None]),
            r"student's hidden states have shape \[1, 23, 32\]",
        ),
        (
            lambda case: replace(case, student_hidden=case.student_hidden.bfloat16()),
            "student's hidden states are torch.bfloat16 but its head is torch.float32",
        ),
        (
            lambda case: replace(case, teacher_hidden=case.teacher_hidden.half()),
            "teacher's hidden states are torch.float16: use",
        ),
        (
            lambda case: replace(
                case, student_head=replace(case.student_head, bias=torch.zeros(1003).double())
            ),
            "student's hidden states are torch.float32 but its head is torch.float64",
        ),
        (
            lambda case: replace(case, weights=torch.ones(22)),
            r"weights have shape \[22\] .* give \[23\] of a floating dtype",
        ),
        (lambda case: replace(case, weights=case.labels), "dtype torch.int64: give"),
        (lambda case: replace(case, weights=torch.ones(23).requires_grad_()), "detach them"),
    ],
)
def test_tensors(change, message):
    case = change(make_case())
    with pytest.raises(InputError, match=message):
        loss_of(case, options_for("jsd"))


@pytest.mark.parametrize(
    "weight_grad", [torch.zeros(1003, 31), torch.zeros(1003, 32).bfloat16()], ids=["shape", "dtype"]
)
def test_weight_grad(weight_grad):
    with pytest.raises(InputError, match=r"give \[1003, 32\] of torch.float32"):
        loss_of(make_case(), options_for("jsd"), weight_grad=weight_grad)


@pytest.mark.parametrize("num_tokens", [0, torch.tensor(0), -3])
def test_num_tokens(num_tokens):
    with pytest.raises(InputError, match=r"num_tokens = .* with 18 labelled tokens"):
        loss_of(make_case(), options_for("jsd"), num_tokens=num_tokens)


def test_other_ignore_index():
    case = with_label(make_case(), 5)
    other = replace(case, labels=torch.where(case.labels == -100, 5, case.labels))
    ignored = replace(case, labels=torch.where(case.labels == 5, -100, case.labels))
    assert loss_of(other, options_for("jsd", ignore_index=5)) == loss_of(
        ignored, options_for("jsd")
    )
