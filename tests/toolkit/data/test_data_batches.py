import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config import DataSection
from toolkit.data.batches import Batch, Batches
from toolkit.data.tokens import TokenFile
from toolkit.errors import InputError

EOS = 0


def token_file(ids: Any, **known: Any) -> TokenFile:
    return TokenFile(Path("corpus.bin"), np.asarray(ids, dtype=np.uint16), **known)


def section(length: int = 4, **keys: Any) -> DataSection:
    return DataSection(tokens="corpus.bin", sequence_length=length, **keys)


def counting(num_tokens: int = 101, accumulation: int = 1, seed: int = 0, **keys: Any) -> Batches:
    """Batches of the corpus 0, 1, 2, ..., where a row's first id tells its sample."""
    file = token_file(range(num_tokens))
    return Batches(
        file, section(**keys), seed=seed, accumulation=accumulation, vocab_size=num_tokens
    )


def same(one: Batch, other: Batch) -> bool:
    tensors = ("ids", "positions", "labels", "rows")
    return (one.index, one.step_tokens) == (other.index, other.step_tokens) and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in tensors
    )


def samples(batches: Any, length: int = 4) -> list[int]:
    return [int(row[0]) // length for batch in batches for row in batch.ids]


def test_a_plain_row() -> None:
    (batch,) = counting(num_tokens=5).training(0, 1)
    assert batch.ids.tolist() == [[0, 1, 2, 3]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]]
    assert batch.labels.tolist() == [1, 2, 3, 4]
    assert batch.rows.tolist() == [0, 1, 2, 3]
    assert (batch.index, batch.num_tokens, batch.step_tokens) == (0, 4, 4)
    for tensor in (batch.ids, batch.positions, batch.labels, batch.rows):
        assert tensor.dtype == torch.int64


def test_a_packed_row() -> None:
    # The last label, 9, is the start of a new document: nothing predicts it.
    file = token_file([5, 6, EOS, EOS, 7, 8, EOS, 9], eos_id=EOS)
    batches = Batches(file, section(7, packing="documents"), seed=0, vocab_size=10)
    (batch,) = batches.training(0, 1)
    assert batch.ids.tolist() == [[5, 6, EOS, EOS, 7, 8, EOS]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1, 2]]
    assert batch.rows.tolist() == [0, 1, 4, 5]
    assert batch.labels.tolist() == [6, EOS, 8, EOS]
    assert batch.step_tokens == 4


@given(
    st.lists(st.integers(0, 4), min_size=25, max_size=80),
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["none", "documents"]),
)
def test_rows_labels_and_positions(
    corpus: list[int], length: int, batch_size: int, accumulation: int, packing: str
) -> None:
    # Of two neighbours one is no end-of-text token, so that every row has a label.
    corpus[::2] = [max(token, 1) for token in corpus[::2]]
    cut = section(length, batch_size=batch_size, packing=packing)
    file = token_file(corpus, eos_id=EOS)
    batches = Batches(file, cut, seed=3, accumulation=accumulation, vocab_size=5)
    rows_of = [corpus[s : s + length + 1] for s in range(0, len(corpus) - length, length)]
    found = list(batches.training(0, 3))
    for batch in found:
        ids, positions = batch.ids.flatten().tolist(), batch.positions.flatten().tolist()
        labels = dict(zip(batch.rows.tolist(), batch.labels.tolist(), strict=True))
        for place, token in enumerate(ids):
            row, column = divmod(place, length)
            follows_eos = packing == "documents" and column > 0 and ids[place - 1] == EOS
            expected = 0 if column == 0 or follows_eos else positions[place - 1] + 1
            assert positions[place] == expected
            assert (place in labels) == (packing == "none" or token != EOS)
            if place in labels and column + 1 < length:
                assert labels[place] == ids[place + 1]
        if packing == "none":
            for row in range(batch_size):
                start, end = row * length, (row + 1) * length
                assert [*ids[start:end], labels[end - 1]] in rows_of
        assert batch.num_tokens == len(labels)
    for step in range(3):
        parts = found[step * accumulation : (step + 1) * accumulation]
        total = sum(batch.num_tokens for batch in parts)
        assert [batch.step_tokens for batch in parts] == [total] * accumulation


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("start", [0, 1, 7, 9])
def test_resumption_needs_the_step_alone(packing: str, start: int) -> None:
    file = token_file([*range(9)] * 12, eos_id=EOS)
    cut = section(batch_size=2, eval_rows=3, packing=packing)
    whole = list(Batches(file, cut, seed=5, accumulation=3, vocab_size=9).training(0, 9))
    resumed = list(Batches(file, cut, seed=5, accumulation=3, vocab_size=9).training(start, 9))
    assert len(resumed) == 3 * (9 - start)
    assert all(map(same, resumed, whole[3 * start :]))
    assert [batch.index for batch in whole] == list(range(27))


def test_the_order_does_not_depend_on_the_shape_of_a_step() -> None:
    orders = [
        samples(counting(batch_size=b, accumulation=a).training(0, 24 // (a * b)))
        for a, b in itertools.product((1, 2, 3), (1, 2, 4))
    ]
    assert len(orders[0]) == 24
    assert all(order == orders[0] for order in orders)


def test_the_seed_decides_the_order() -> None:
    assert samples(counting(seed=1).training(0, 25)) != samples(counting(seed=2).training(0, 25))


def test_an_epoch_trains_everything_but_the_held_out_once() -> None:
    batches = counting(eval_rows=5, batch_size=2)
    assert sorted(samples(batches.training(0, 10))) == list(range(20))
    assert sorted(samples(batches.training(10, 20))) == list(range(20))
    held_out = list(batches.held_out())
    assert samples(held_out) == [20, 21, 22, 23, 24]
    assert [batch.index for batch in held_out] == [0, 1, 2]
    assert [len(batch.ids) for batch in held_out] == [2, 2, 1]
    assert [batch.step_tokens for batch in held_out] == [8, 8, 4]
    assert held_out[-1].labels.tolist() == [97, 98, 99, 100]


def test_nothing_held_out() -> None:
    assert list(counting().held_out()) == []


def test_larger_vocabulary_is_refused_and_smaller_taken() -> None:
    file = token_file(range(10), vocab_size=151_936)
    with pytest.raises(InputError, match=r"corpus\.bin .* 151936 tokens .* have 50257"):
        Batches(file, section(), seed=0, vocab_size=50_257)
    Batches(file, section(), seed=0, vocab_size=152_064)


@pytest.mark.parametrize(("num_tokens", "eval_rows"), [(1, 0), (4, 0), (12, 2)])
def test_too_few_tokens(num_tokens: int, eval_rows: int) -> None:
    with pytest.raises(InputError) as caught:
        counting(num_tokens=num_tokens, eval_rows=eval_rows)
    for part in (
        f"has {num_tokens} tokens",
        f"make {(num_tokens - 1) // 4} rows",
        "data.sequence_length = 4",
        f"data.eval_rows = {eval_rows}",
        "prepare more text",
    ):
        assert part in str(caught.value)
    counting(num_tokens=4 * (eval_rows + 1) + 1, eval_rows=eval_rows)


def test_packing_needs_the_end_of_text_id() -> None:
    with pytest.raises(InputError, match=r"packing = 'documents' .* corpus\.bin .* 'none'"):
        Batches(token_file(range(10)), section(packing="documents"), seed=0, vocab_size=10)


@pytest.mark.parametrize("bad", [10, -1])
def test_an_id_outside_the_vocabulary(bad: int) -> None:
    ids = np.arange(9, dtype=np.int32)
    ids[6] = bad
    batches = Batches(TokenFile(Path("corpus.npy"), ids), section(), seed=0, vocab_size=10)
    with pytest.raises(InputError, match=rf"corpus\.npy has id {bad} at token 6, .* of 10:"):
        list(batches.training(0, 2))


def test_a_step_without_labels_is_refused() -> None:
    file = token_file([EOS] * 9, eos_id=EOS)
    batches = Batches(file, section(packing="documents", batch_size=2), seed=0, vocab_size=10)
    with pytest.raises(InputError, match=r"nothing but end-of-text .* 2 rows of micro-batch 0"):
        next(batches.training(0, 1))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_the_micro_batches_of_a_step(num_ranks: int) -> None:
    """Together they do what one rank with as much accumulation does."""
    cut, file = section(eval_rows=5), token_file([*range(9)] * 12, eos_id=EOS)

    def of(rank: int, ranks: int, accumulation: int) -> Batches:
        return Batches(
            *(file, cut),
            seed=5,
            accumulation=accumulation,
            vocab_size=9,
            rank=rank,
            num_ranks=ranks,
        )

    one = of(0, 1, 2 * num_ranks)
    shares = [of(rank, num_ranks, 2) for rank in range(num_ranks)]
    for whole, parts in (
        (list(one.training(1, 3)), [list(share.training(1, 3)) for share in shares]),
        (list(one.held_out()), [list(share.held_out()) for share in shares]),
    ):
        merged = sorted(itertools.chain(*parts), key=lambda batch: batch.index)
        assert len(merged) == len(whole)
        assert all(map(same, merged, whole))
    assert [len(list(share.training(0, 1))) for share in shares] == [2] * num_ranks
