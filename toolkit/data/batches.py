"""Batches: rows cut from a token file, packed, labelled, and in an order that needs no state.

Shapes: B rows of a micro-batch, L sequence length, R labelled rows of B*L, S rows of a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.config import DataSection
from toolkit.data.order import sample_index
from toolkit.data.tokens import TokenFile
from toolkit.errors import InputError


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch.

    Attributes:
        index: its number in the run, over all steps; held-out batches count on their own.
        ids: token ids, int64 `[B, L]`.
        positions: positions in the row, or in the document when packed, int64 `[B, L]`.
        labels: the next token of every labelled position, int64 `[R]`.
        rows: flat indices into B*L of the labelled positions, ascending, int64 `[R]`.
        step_tokens: labelled positions of the whole optimizer step, the loss's normaliser.
    """

    index: int
    ids: Tensor
    positions: Tensor
    labels: Tensor
    rows: Tensor
    step_tokens: int

    @property
    def num_tokens(self) -> int:
        """Number of labelled positions, R."""
        return self.rows.numel()


class Batches:
    """Cuts a token file into training and held-out batches.

    Sample `s` is `tokens[s*L : s*L + L + 1]`: the first L are its inputs, the last L its labels.
    The last `eval_rows` samples are held out; the order runs over the others.
    """

    def __init__(
        self,
        tokens: TokenFile,
        section: DataSection,
        *,
        seed: int,
        accumulation: int = 1,
        vocab_size: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Check that the file serves the section and a model of `vocab_size` tokens.

        Args:
            tokens: the file.
            section: how it is cut.
            seed: names the order.
            accumulation: micro-batches of a step on each rank.
            vocab_size: number of token ids that the models know.
            rank: which of the ranks that share the micro-batches of a step in turn.
            num_ranks: how many there are.

        Raises:
            InputError: if the file has a larger vocabulary or too few tokens, or if documents are
                to be told apart and the file does not say by which token.
        """
        _check(tokens, section, vocab_size)
        self._file = tokens
        self._section = section
        self._eos_id = tokens.eos_id if section.packing == "documents" else None
        self._seed = seed
        self._accumulation = accumulation
        self._vocab_size = vocab_size
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_samples = _num_samples(tokens, section)
        self._num_trained = self._num_samples - section.eval_rows

    def training(self, start_step: int, num_steps: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of the steps from `start_step` up to `num_steps`.

        Row `r` of micro-batch `m` is number `m*B + r` of the order, so the step is all there is
        to resume; the ranks take the micro-batches in turn.

        Raises:
            InputError: if a row holds an id outside the vocabulary, or a step has no label.
        """
        step_batches = self._accumulation * self._num_ranks
        step_rows = self._section.batch_size * step_batches
        for step in range(start_step, num_steps):
            places = range(step * step_rows, (step + 1) * step_rows)
            samples = [sample_index(self._seed, place, self._num_trained) for place in places]
            for batch in self._cut(samples, step * step_batches):
                if batch.index % self._num_ranks == self._rank:
                    yield batch

    def held_out(self) -> Iterator[Batch]:
        """Yield this rank's share of the last `eval_rows` samples, each batch a step of its own.

        Raises:
            InputError: if a row holds an id outside the vocabulary, or a step has no label.
        """
        samples = range(self._num_trained, self._num_samples)
        for index, first in enumerate(range(0, len(samples), self._section.batch_size)):
            if index % self._num_ranks == self._rank:
                yield from self._cut(samples[first : first + self._section.batch_size], index)

    def _cut(self, samples: Sequence[int], index: int) -> Iterator[Batch]:
        """Yield the micro-batches, `index` first, of a step that consists of these samples."""
        rows_SL1 = np.stack([self._sample(sample) for sample in samples])
        ids_SL, labels_SL = rows_SL1[:, :-1], rows_SL1[:, 1:]
        positions_SL, labelled_SL = pack(ids_SL, self._eos_id)
        step_tokens = int(labelled_SL.sum())
        if step_tokens == 0:
            raise InputError(
                f"{self._file.path} has nothing but end-of-text tokens in the {len(samples)} rows "
                f"of micro-batch {index}: prepare the text again or set data.packing = 'none'"
            )
        for number, first in enumerate(range(0, len(samples), self._section.batch_size)):
            part = slice(first, first + self._section.batch_size)
            yield Batch(
                index=index + number,
                ids=torch.tensor(ids_SL[part]),
                positions=torch.tensor(positions_SL[part]),
                labels=torch.tensor(labels_SL[part][labelled_SL[part]]),
                rows=torch.tensor(np.flatnonzero(labelled_SL[part])),
                step_tokens=step_tokens,
            )

    def _sample(self, sample: int) -> NDArray[np.int64]:
        length = self._section.sequence_length
        row = self._file.tokens[sample * length : (sample + 1) * length + 1].astype(np.int64)
        outside = np.flatnonzero((row < 0) | (row >= self._vocab_size))
        if outside.size:
            raise InputError(
                f"{self._file.path} has id {row[outside[0]]} at token "
                f"{sample * length + outside[0]}, outside the models' vocabulary of "
                f"{self._vocab_size}: prepare the text with the models' tokenizer"
            )
        return row


def _num_samples(tokens: TokenFile, section: DataSection) -> int:
    return (tokens.tokens.size - 1) // section.sequence_length


def _check(tokens: TokenFile, section: DataSection, vocab_size: int) -> None:
    num_samples = _num_samples(tokens, section)
    if tokens.vocab_size is not None and tokens.vocab_size > vocab_size:
        raise InputError(
            f"{tokens.path} was made with a vocabulary of {tokens.vocab_size} tokens but the "
            f"models have {vocab_size}: prepare the text with the models' tokenizer"
        )
    if num_samples <= section.eval_rows:
        raise InputError(
            f"{tokens.path} has {tokens.tokens.size} tokens, which make {num_samples} rows of "
            f"data.sequence_length = {section.sequence_length} and a label, but "
            f"data.eval_rows = {section.eval_rows} and one row to train on are needed: "
            "prepare more text or lower one of the two"
        )
    if section.packing == "documents" and tokens.eos_id is None:
        raise InputError(
            f"data.packing = 'documents' needs the end-of-text id, which {tokens.path} does not "
            "record: make a native file with `disaggkd prepare`, or set data.packing = 'none'"
        )


def pack(ids: NDArray[np.int64], eos_id: int | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return positions `[S, L]` and which positions are labelled, bool `[S, L]`, of ids `[S, L]`.

    Positions restart after each end-of-text token; a row starts at 0, also in the middle of a
    document. From an end-of-text token nothing is predicted: the next document is unrelated.
    Without an `eos_id` a row is one document and wholly labelled.
    """
    columns = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    if eos_id is None:
        return columns, np.ones_like(ids, dtype=np.bool_)
    ends = ids == eos_id
    starts = np.zeros_like(ids)
    starts[:, 1:] = np.where(ends[:, :-1], columns[:, 1:], 0)
    return columns - np.maximum.accumulate(starts, axis=1), ~ends
