"""Waiting for a word, checksums, locked memory."""

import random
import threading
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from transport_processes import Child, lock_too_much

from transport import memory
from transport.errors import DeadlineError
from transport.memory import address_of, crc32c, lock, ring_bell, wait_word


def portable(data: bytes, seed: int = 0) -> int:
    """Compute as on a processor without the instruction."""
    view = memoryview(data)
    return int(memory._library().dkm_crc32c_portable(seed, address_of(view), view.nbytes))


def reference(data: bytes, seed: int = 0) -> int:
    """Divide by the polynomial, bit by bit."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("rings", [True, False])
def test_wait_sees_a_word_that_another_thread_writes(rings: bool) -> None:
    words = np.zeros(16, np.uint64)
    word, bell = words.ctypes.data, words.ctypes.data + 64

    def write() -> None:
        words[0] = 7
        if rings:
            ring_bell(bell)

    writer = threading.Timer(0.05, write)
    writer.start()
    wait_word(word, 7, bell, 10)
    assert words[8] == rings
    writer.join()
    with pytest.raises(DeadlineError, match=r"was not 0x8 within 0\.01 s"):
        wait_word(word, 8, bell, 0.01)


every_way = pytest.mark.parametrize("compute", [crc32c, portable])


@every_way
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next ones: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_of_known_bytes(compute: Callable[[bytes], int], data: bytes, crc: int) -> None:
    assert compute(data) == crc


@every_way
@pytest.mark.parametrize("num_bytes", [*range(1, 20), 32767, 32768, 32769, 100_003])
def test_crc32c_is_the_remainder(compute: Callable[[bytes, int], int], num_bytes: int) -> None:
    data, seed = random.Random(num_bytes).randbytes(num_bytes), num_bytes * 0x9E3779B9 % 2**32
    assert compute(data, seed) == reference(data, seed)


@every_way
def test_crc32c_of_parts_is_that_of_the_whole(compute: Callable[..., int]) -> None:
    data = random.Random(0).randbytes(200_000)
    for cut in (0, 1, 7, 40_000, 199_999, 200_000):
        assert compute(data[cut:], compute(data[:cut])) == compute(data)


def test_crc32c_takes_unaligned_and_shaped_memory() -> None:
    data = random.Random(1).randbytes(70_001)
    assert crc32c(memoryview(data)[1:]) == reference(data[1:])
    rows = np.frombuffer(data[1:], np.float16).reshape(100, -1)
    assert crc32c(rows.data) == reference(data[1:])


def locked_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmLck:")[2].split()[0]) * 1024


def test_memory_is_locked_until_the_end() -> None:
    before = locked_bytes()
    with mmap(-1, 1 << 14) as area:
        memory = np.frombuffer(area, np.uint8)
        with lock(memory.ctypes.data, memory.nbytes) as how:
            assert how == "locked in memory"
            assert locked_bytes() == before + (1 << 14)
        assert locked_bytes() == before
        del memory


def test_limit_of_locked_memory_is_told_with_a_remedy(start: Callable[..., Child]) -> None:
    how = start(lock_too_much).result()
    assert "1048576 bytes are needed, RLIMIT_MEMLOCK is 65536" in how
    assert "`ulimit -l unlimited`" in how
    assert "PropagateResourceLimitsExcept=MEMLOCK" in how
