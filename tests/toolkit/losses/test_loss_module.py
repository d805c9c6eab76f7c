"""The loss in the training loop of docs/loss.md, against full logits of transformers."""

import copy
import re
from pathlib import Path

import torch
from loss_cases import make_case, options_for
from torch.nn import functional

from toolkit.config import ModelSection
from toolkit.losses import DistillationLoss, distillation_loss
from toolkit.models.load import load_model

PAGE = Path(__file__).parents[3] / "docs" / "loss.md"


def tiny_llama(hidden_size, seed):
    config = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": hidden_size == 16,
    }
    return load_model(ModelSection(config=config, seed=seed))


def random_batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(0, 97, (2, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0  # right padding
        labels = torch.where(mask.bool(), ids, -100)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train_on_full_logits(student, teacher, optimizer, batch):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    labels = batch["labels"][:, 1:].flatten()
    log_q = student(**inputs).logits[:, :-1].flatten(0, 1).log_softmax(-1)[labels != -100]
    log_p = teacher(**inputs).logits[:, :-1].flatten(0, 1).log_softmax(-1)[labels != -100]
    kd = functional.kl_div(log_q, log_p.detach(), log_target=True, reduction="batchmean")
    ce = functional.nll_loss(log_q, labels[labels != -100])
    loss = 0.9 * kd + 0.1 * ce
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_loop_of_the_documentation_trains_as_full_logits_do():
    student, teacher = tiny_llama(16, 1), tiny_llama(24, 2)
    reference = copy.deepcopy(student)
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    lines = [line for line in block.splitlines() if line and "import " not in line]
    assert len(lines) <= 10
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    namespace = {"student": student, "teacher": teacher, "optimizer": optimizer}
    exec(block, namespace | {"loader": list(random_batches())})

    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in random_batches():
        train_on_full_logits(reference, teacher, optimizer, batch)
    start = tiny_llama(16, 1)
    for (name, trained), expected, before in zip(
        student.named_parameters(), reference.parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-5, msg=name)
        assert not torch.equal(trained, before)


def test_module_computes_the_function_and_shows_its_options():
    case, options = make_case(weighted=True), options_for("jsd")
    arguments = (case.student_hidden, case.student_head, case.teacher_hidden, case.teacher_head)
    module = DistillationLoss(options)
    for kwargs in ({}, {"weights": case.weights, "num_tokens": 7}):
        sums = module(*arguments, case.labels, **kwargs)
        assert sums == distillation_loss(*arguments, case.labels, options, **kwargs)
    assert list(module.parameters()) == []
    assert "divergence='jsd', beta=0.3" in repr(module)
