import json
from dataclasses import replace

import pytest
import torch
from tiny_models import GEMMA2, GRANITE, LLAMA, PHI, random_model, random_section

from toolkit.errors import InputError
from toolkit.models.facts import (
    TeacherFacts,
    check_same_tokenizer,
    check_same_vocabulary,
    teacher_facts,
)
from toolkit.models.heads import head_of
from toolkit.models.load import load_config


def facts_of(config, **extra):
    model = random_model(config, **extra)
    return teacher_facts(model.config, head_of(model), "abc")


def test_facts_are_read_from_head_and_contract():
    facts = facts_of(GEMMA2, dtype="bfloat16")
    assert (facts.hidden_size, facts.vocab_size, facts.dtype) == (32, 97, "bfloat16")
    assert (facts.scale, facts.softcap, facts.tokenizer_digest) == (1.0, 2.0, "abc")
    assert facts_of(GRANITE).scale == 1 / 3


def test_facts_survive_the_wire():
    facts = facts_of(GRANITE)
    assert TeacherFacts(**json.loads(json.dumps(facts.as_dict()))) == facts


@pytest.mark.parametrize(
    "change", ["weight", "bias", "scale", "softcap", "configuration"], ids=lambda name: name
)
def test_fingerprint_sees_every_part(change):
    model = random_model(PHI)
    head, config = head_of(model), model.config
    before = teacher_facts(config, head, None)
    if change == "weight":
        weight = head.weight.detach().clone()
        weight[-1, -1] += 1e-6
        head = replace(head, weight=weight)
    elif change == "bias":
        head = replace(head, bias=None)
    elif change == "configuration":
        config = load_config(random_section({**PHI, "layer_norm_eps": 1e-3}))
    else:
        head = replace(head, **{change: 2.0})
    assert teacher_facts(config, head, None).fingerprint != before.fingerprint


def test_fingerprint_ignores_where_and_in_which_file_dtype_a_model_was(tmp_path):
    model = random_model(LLAMA)
    before = teacher_facts(model.config, head_of(model), None)
    model.config._name_or_path = str(tmp_path)
    model.config.dtype = torch.bfloat16
    assert teacher_facts(model.config, head_of(model), None) == before


def test_vocabularies_are_never_cut():
    check_same_vocabulary(97, 97)
    with pytest.raises(InputError, match=r"student's head has 97 .* teacher's 128; .*= 128"):
        check_same_vocabulary(97, 128)


@pytest.mark.parametrize(
    ("digests", "pair"),
    [
        (("a", "b", None), r"student's tokenizer \(a\) is not the teacher's \(b\)"),
        (("a", None, "b"), r"student's tokenizer \(a\) is not the token file's \(b\)"),
        ((None, "a", "b"), r"teacher's tokenizer \(a\) is not the token file's \(b\)"),
        (("a", "a", "b"), r"student's tokenizer \(a\) is not the token file's \(b\)"),
    ],
)
def test_tokenizers_that_differ_are_named(digests, pair):
    with pytest.raises(InputError, match=pair):
        check_same_tokenizer(*digests)


@pytest.mark.parametrize("digests", [("a", "a", "a"), ("a", None, "a"), (None, None, None)])
def test_tokenizers_that_agree_or_are_unknown_pass(digests):
    check_same_tokenizer(*digests)
