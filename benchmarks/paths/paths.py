"""All paths that are compared, in processes that live as long as the benchmark."""

import ctypes
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from paths.loop import build
from paths.other_sides import GlooSide, Memory, ZeromqSide
from paths.perftest import put_gibps
from paths.processes import SPAWN, PinnedProcess, started
from paths.ring_side import RingSide
from paths.settings import quiet_settings
from paths.side import PING_BYTES, SLOTS

MIB, GIB = 1 << 20, 1 << 30
VARIANTS = {"": False, "_written_read": True}
UCX_SETTINGS = {
    "posix": quiet_settings("posix"),
    "cma": quiet_settings("posix,cma"),
    "cma_ordinary": quiet_settings("posix,cma") | {"UCX_ALLOC_PRIO": "thp,mmap,heap"},
    "tcp": quiet_settings("tcp"),
}
PATHS = (*UCX_SETTINGS, "gloo", "zeromq")


class Stream(NamedTuple):
    """How a stream runs.

    Attributes:
        path: whose processes.
        send: method of the writer.
        receive: method of the reader.
        arguments: for both.
    """

    path: str
    send: str = "send"
    receive: str = "receive"
    arguments: tuple[int, ...] = ()


STREAMS = {
    **{path: Stream(path, "send_in_c", "receive_in_c", (SLOTS,)) for path in UCX_SETTINGS},
    **{f"{path}_1_slot": Stream(path, "send_in_c", "receive_in_c", (1,)) for path in UCX_SETTINGS},
    **{f"{path}_python": Stream(path) for path in UCX_SETTINGS},
    "gloo": Stream("gloo"),
    "zeromq": Stream("zeromq"),
}
MEMCPY = {
    "memcpy_1_buffer": (1, False),
    f"memcpy_{SLOTS}_buffers": (SLOTS, False),
    f"memcpy_{SLOTS}_shared": (SLOTS, True),
}
_PINGS = 100
_TRICKLE_INTERVAL_S = 0.01

Figures = dict[str, float]
Pair = tuple[PinnedProcess, PinnedProcess]


class Paths:
    """The processes of every path, and how long each of their streams takes."""

    def __init__(
        self, cores: tuple[int, int], sizes_mib: tuple[int, ...], duration_s: float, folder: Path
    ) -> None:
        """Start the processes.

        Args:
            cores: of the writers and of the readers.
            sizes_mib: sizes of the messages.
            duration_s: how long a stream shall last.
            folder: for gloo's rendezvous and the compiled loops.
        """
        self._cores = cores
        self._duration_s = duration_s
        self._num_messages: dict[str, int] = {}
        self._elapsed_s = 0.0
        sizes = [size * MIB for size in sizes_mib]
        library = build(folder)

        def pair(*sides: tuple[Any, ...]) -> Pair:
            credits = SPAWN.Semaphore(SLOTS)
            writer, reader = (
                PinnedProcess(core, make, credits, *arguments)
                for core, (make, *arguments) in zip(cores, sides, strict=True)
            )
            return writer, reader

        def rings(written: list[int], read: list[int]) -> dict[str, Pair]:
            """Start a pair for every transport, with rings of these sizes on each side."""
            return {
                path: pair(*((RingSide, settings, side, library, word) for side in (written, read)))
                for path, settings in UCX_SETTINGS.items()
                for word in [SPAWN.RawValue(ctypes.c_uint64)]
            }

        self._pairs = rings([], sizes)
        self._ping_pairs = rings([PING_BYTES], [PING_BYTES])
        self._pairs["gloo"] = pair(*((GlooSide, folder / "gloo", rank) for rank in (0, 1)))
        self._pairs["zeromq"] = pair((ZeromqSide,), (ZeromqSide,))
        self._memory, self._alone = (PinnedProcess(core, Memory, library) for core in cores)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Wait for the processes and connect them; end them at the end."""
        pairs = [*self._pairs.values(), *self._ping_pairs.values()]
        with started(self._memory, self._alone, *(process for pair in pairs for process in pair)):
            for path in UCX_SETTINGS:
                for one, other in (self._pairs[path], self._ping_pairs[path]):
                    one.call("connect", other.call("where"))
                    other.call("connect", one.call("where"))
            writer, reader = self._pairs["zeromq"]
            writer.call("connect", reader.call("bind"))
            yield

    def streams(self, kind: str, size_mib: int) -> Figures:
        """Measure both variants of a kind of stream."""
        figures: Figures = {}
        stream = STREAMS[kind]
        writer, reader = self._pairs[stream.path]
        for variant, touched in VARIANTS.items():
            name = f"{kind}_{size_mib}mib{variant}"
            for num_messages in self._long_enough(name):
                for side, call in ((reader, stream.receive), (writer, stream.send)):
                    side.begin(call, size_mib * MIB, num_messages, touched, *stream.arguments)
                sent, received = writer.result(), reader.result()
                self._elapsed_s = sent.elapsed_s
            gib = num_messages * size_mib * MIB / GIB
            figures[name] = gib / sent.elapsed_s
            figures[f"{name}_writer_cpu_s_per_gib"] = sent.cpu_s / gib
            figures[f"{name}_reader_cpu_s_per_gib"] = received.cpu_s / gib
        return figures

    def copies(self, size_mib: int) -> Figures:
        """Measure memcpy into one buffer, and into as many as a ring has slots."""
        figures: Figures = {}
        for kind, (num_buffers, shared) in MEMCPY.items():
            name = f"{kind}_{size_mib}mib"
            for num_copies in self._long_enough(name):
                self._elapsed_s = self._memory.call(
                    "copy", size_mib * MIB, num_buffers, shared, num_copies
                )
            figures[name] = num_copies * size_mib * MIB / GIB / self._elapsed_s
        return figures

    def _long_enough(self, name: str) -> Iterator[int]:
        """Yield numbers of messages: few to warm up, then until half the duration is reached."""
        yield 2 * SLOTS  # memory that lay idle may have been reclaimed
        self._elapsed_s = 0.0
        while self._elapsed_s < self._duration_s / 2:
            num_messages = self._num_messages.get(name, 2 * SLOTS)
            yield num_messages
            wanted = math.ceil(self._duration_s * num_messages / self._elapsed_s)
            self._num_messages[name] = max(2 * SLOTS, wanted)

    def perftests(self, size_mib: int) -> Figures:
        """Measure ucx_perftest, each with as many messages as the ring over the same path."""
        return {
            f"perftest_{path}_{size_mib}mib": put_gibps(
                settings, size_mib * MIB, self._num_messages[f"{path}_{size_mib}mib"], self._cores
            )
            for path, settings in UCX_SETTINGS.items()
        }

    def round_trip(self, path: str) -> Figures:
        """Measure 64 bytes there and back."""
        one, other = self._ping_pairs.get(path, self._pairs[path])
        other.begin("pong", _PINGS)
        times_s = one.call("ping", _PINGS)
        other.result()
        return {f"{path}_round_trip_us": statistics.median(times_s) * 1e6}

    def progress_cost(self) -> Figures:
        """Measure what the progress thread takes from a main thread that is busy with Python."""
        writer, reader = self._pairs["tcp"]
        alone = self._alone.call("count", self._duration_s)
        idle = reader.call("count", self._duration_s)
        writer.begin("trickle", MIB, _TRICKLE_INTERVAL_S, self._duration_s)
        receiving = reader.call("count", self._duration_s)
        writer.result()
        return {
            "progress_idle_share": 1 - idle / alone,
            "progress_receiving_share": 1 - receiving / alone,
        }
