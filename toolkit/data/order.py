"""The order of samples: a keyed permutation that is computed, never stored."""

from hashlib import blake2b

_ROUNDS = 8


def sample_index(seed: int, global_index: int, num_samples: int) -> int:
    """Return which of `num_samples` samples comes at a place of the training order.

    Every epoch (`num_samples` places) is a permutation of its own. It is a Feistel network over
    the next power of four, walked until the value is a sample (cycle walking: Black and Rogaway
    2002, "Ciphers with Arbitrary Finite Domains"); four walks at most are expected.

    Args:
        seed: names the order.
        global_index: place in the order, over all epochs, from 0.
        num_samples: number of samples of an epoch, at least 1.
    """
    assert global_index >= 0 and num_samples >= 1
    epoch, value = divmod(global_index, num_samples)
    half_bits = ((num_samples - 1).bit_length() + 1) // 2
    while True:
        value = _permute(value, half_bits, f"{seed}:{epoch}")
        if value < num_samples:
            return value


def _permute(value: int, half_bits: int, key: str) -> int:
    """Permute `[0, 4**half_bits)` by a balanced Feistel network."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        digest = blake2b(f"{key}:{number}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right
