"""What both ends must agree on about the teacher before the first step."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.models.heads import LMHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Where and how a configuration was loaded, which says nothing of the model.
_VOLATILE = ("_name_or_path", "architectures", "dtype", "transformers_version")


@dataclass(frozen=True)
class TeacherFacts:
    """Facts that a teacher announces, and that a student computes from its own configuration.

    Attributes:
        fingerprint: digest of the model's configuration and of the whole head.
        hidden_size: width of the hidden states, by the head's weight.
        dtype: of the head and the hidden states, for example `bfloat16`.
        vocab_size: rows of the head.
        tokenizer_digest: None where the run has no tokenizer.
        scale: of the head's contract.
        softcap: of the head's contract.
    """

    fingerprint: str
    hidden_size: int
    dtype: str
    vocab_size: int
    tokenizer_digest: str | None
    scale: float
    softcap: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types, for the wire."""
        return asdict(self)


def teacher_facts(
    config: "PreTrainedConfig", head: LMHead, tokenizer_digest: str | None
) -> TeacherFacts:
    """Gather the facts, the same from a loaded model as from its configuration and head alone.

    Args:
        config: of the loaded model, or of `load_config`.
        head: from `head_of` or `load_head`.
        tokenizer_digest: None where the run has no tokenizer.
    """
    vocab_size, hidden_size = head.weight.shape
    return TeacherFacts(
        fingerprint=_fingerprint(config, head),
        hidden_size=hidden_size,
        dtype=str(head.weight.dtype).removeprefix("torch."),
        vocab_size=vocab_size,
        tokenizer_digest=tokenizer_digest,
        scale=head.scale,
        softcap=head.softcap,
    )


def check_same_vocabulary(student_rows: int, teacher_rows: int) -> None:
    """Refuse heads of different vocabularies, which are never cut or padded silently.

    Raises:
        InputError: the numbers of rows differ.
    """
    if student_rows != teacher_rows:
        raise InputError(
            f"the student's head has {student_rows} tokens and the teacher's {teacher_rows}; give"
            f" the student vocab_size = {teacher_rows} (in student.config, or for a folder with"
            " transformers' resize_token_embeddings)"
        )


def check_same_tokenizer(student: str | None, teacher: str | None, tokens: str | None) -> None:
    """Refuse digests of tokenizers that differ; an unknown one (None) is not compared.

    Raises:
        InputError: two of the known ones differ; the message names the two.
    """
    origins = {"student": student, "teacher": teacher, "token file": tokens}
    known = [(origin, digest) for origin, digest in origins.items() if digest is not None]
    for origin, digest in known[1:]:
        first_origin, first = known[0]
        if digest != first:
            raise InputError(
                f"the {first_origin}'s tokenizer ({first}) is not the {origin}'s ({digest}); the"
                " ids of one mean other tokens to the other: use models of one tokenizer, and"
                " prepare the token file with it"
            )


def _fingerprint(config: "PreTrainedConfig", head: LMHead) -> str:
    text = json.dumps(config.get_text_config().to_dict())
    described = json.loads(text, object_hook=_without_volatile)
    contract = json.dumps([described, head.scale, head.softcap], sort_keys=True)
    digest = hashlib.blake2b(contract.encode(), digest_size=16)
    digest.update(_raw(head.weight))
    if head.bias is not None:
        digest.update(_raw(head.bias))
    return digest.hexdigest()


def _without_volatile(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _VOLATILE}


def _raw(tensor: Tensor) -> memoryview:
    # numpy knows no bfloat16, hence bytes.
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
