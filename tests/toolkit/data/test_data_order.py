from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.order import sample_index

SEEDS = st.integers(0, 2**70)


@given(SEEDS, st.integers(1, 300), st.integers(0, 5))
def test_every_epoch_is_a_permutation(seed: int, num_samples: int, epoch: int) -> None:
    places = range(epoch * num_samples, (epoch + 1) * num_samples)
    samples = [sample_index(seed, place, num_samples) for place in places]
    assert sorted(samples) == list(range(num_samples))


@given(SEEDS, st.integers(0, 2**60), st.integers(1, 2**50))
def test_a_place_of_a_huge_order_is_found_at_once(seed: int, place: int, num_samples: int) -> None:
    sample = sample_index(seed, place, num_samples)
    assert 0 <= sample < num_samples
    assert sample_index(seed, place, num_samples) == sample


def test_the_order_stays_what_it_was() -> None:
    # A run that is resumed under another version must not see samples twice.
    assert [sample_index(0, place, 10) for place in range(10)] == [2, 3, 0, 4, 7, 1, 6, 5, 9, 8]


def test_seeds_and_epochs_differ() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(sample_index(seed, epoch * 50 + place, 50) for place in range(50))

    assert len({order(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100


def test_every_sample_is_as_likely_at_every_place() -> None:
    num_samples, num_seeds = 6, 1200
    counts = Counter(
        (place, sample_index(seed, place, num_samples))
        for seed in range(num_seeds)
        for place in range(num_samples)
    )
    expected = num_seeds / num_samples
    chi_square = sum(
        (counts[place, sample] - expected) ** 2 / expected
        for place in range(num_samples)
        for sample in range(num_samples)
    )
    # 25 degrees of freedom: mean 25, and above 52.6 once in a thousand.
    assert chi_square < 52.6
