"""Binding of UCX's one-sided operations: worker, region, endpoint, put, fence, flush.

Every call that can take long releases the GIL. Handles are closed by hand, in the order endpoints,
regions, worker: finalizers would run at moments when UCX must not be called.
"""

import ctypes
import re
from functools import cache
from typing import Any

from transport.errors import DeadlineError, UcxError
from transport.handles import Handle
from transport.library import load_ucx

_HANDLE = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_NS = ctypes.c_int64
_STATUS = ctypes.c_int
_OUT_SIZE = ctypes.POINTER(ctypes.c_size_t)
_OUT_HANDLE = ctypes.POINTER(ctypes.c_void_p)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dkx_version": (ctypes.c_char_p, []),
    "dkx_error": (ctypes.c_char_p, [_STATUS]),
    "dkx_worker_open": (_STATUS, [_OUT_HANDLE]),
    "dkx_worker_close": (None, [_HANDLE]),
    "dkx_worker_address": (_STATUS, [_HANDLE, ctypes.c_char_p, _OUT_SIZE]),
    "dkx_progress_start": (_STATUS, [_HANDLE, _HANDLE]),
    "dkx_progress_stop": (None, [_HANDLE]),
    "dkx_region_alloc": (_STATUS, [_HANDLE, _SIZE, _OUT_HANDLE]),
    "dkx_region_address": (ctypes.c_void_p, [_HANDLE]),
    "dkx_region_key": (_STATUS, [_HANDLE, _HANDLE, ctypes.c_char_p, _OUT_SIZE]),
    "dkx_region_free": (_STATUS, [_HANDLE, _HANDLE]),
    "dkx_peer_open": (_STATUS, [_HANDLE, ctypes.c_char_p, _OUT_HANDLE]),
    "dkx_peer_close": (_STATUS, [_HANDLE, ctypes.c_int, _NS]),
    "dkx_peer_describe": (_STATUS, [_HANDLE, ctypes.c_char_p, _OUT_SIZE]),
    "dkx_key_open": (_STATUS, [_HANDLE, ctypes.c_char_p, _OUT_HANDLE]),
    "dkx_key_pointer": (ctypes.c_void_p, [_HANDLE, ctypes.c_uint64]),
    "dkx_key_close": (None, [_HANDLE]),
    "dkx_put": (_STATUS, [_HANDLE, _HANDLE, _HANDLE, _SIZE, ctypes.c_uint64]),
    "dkx_fence": (_STATUS, [_HANDLE]),
    "dkx_flush": (_STATUS, [_HANDLE, _NS]),
}
_TIMEOUT_STATUS = -1000
_BLOB_BYTES = 1 << 16


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@cache
def _library() -> ctypes.CDLL:
    library = load_ucx()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    status = getattr(library, name)(*arguments)
    if status == _TIMEOUT_STATUS:
        raise DeadlineError(f"{name}: deadline passed")
    if status:
        raise UcxError(f"{name}: {library.dkx_error(status).decode()}")


def _create(name: str, *arguments: Any) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call(name, *arguments, ctypes.byref(handle))
    return handle


def _blob(name: str, *arguments: Any) -> bytes:
    buffer = ctypes.create_string_buffer(_BLOB_BYTES)
    size = ctypes.c_size_t(_BLOB_BYTES)
    _call(name, *arguments, buffer, ctypes.byref(size))
    return buffer.raw[: size.value]


def version() -> str:
    """Return the version of the UCX library in use."""
    return str(_library().dkx_version().decode())


class Worker(Handle):
    """A UCX context with one worker, to be used from any thread."""

    def __init__(self) -> None:
        self._handle: ctypes.c_void_p | None = _create("dkx_worker_open")
        self.address = _blob("dkx_worker_address", self._handle)
        """What another process needs to connect to this worker."""

    def start_progress(self, bell: int) -> None:
        """Let a sleeping thread progress the worker: what a target of writes needs.

        Args:
            bell: address of the bell that it rings when something has come in (`memory.ring_bell`).
        """
        _call("dkx_progress_start", self._handle, bell)

    def stop_progress(self) -> None:
        """End that thread, if there is one; the bell's memory must live until then."""
        if self._handle is not None:
            _library().dkx_progress_stop(self._handle)

    def allocate(self, num_bytes: int) -> "Region":
        """Allocate memory that peers may write to."""
        assert self._handle is not None
        return Region(self._handle, num_bytes)

    def connect(self, address: bytes) -> "Endpoint":
        """Return an endpoint to the worker that has this address."""
        assert self._handle is not None
        return Endpoint(self._handle, address)

    def close(self) -> None:
        """Stop progress and destroy the worker; endpoints and regions must be closed before."""
        if self._handle is not None:
            self.stop_progress()
            _library().dkx_worker_close(self._handle)
            self._handle = None


class Region:
    """Memory allocated by UCX, so that a writer on the same host stores straight into it.

    Attributes:
        address: first byte.
        num_bytes: length.
        key: packed remote key, for the writers.
        view: the memory itself; invalid after `close`.
    """

    def __init__(self, worker: ctypes.c_void_p, num_bytes: int) -> None:
        self._worker = worker
        self._handle: ctypes.c_void_p | None = _create("dkx_region_alloc", worker, num_bytes)
        self.address = int(_library().dkx_region_address(self._handle))
        self.num_bytes = num_bytes
        self.key = _blob("dkx_region_key", worker, self._handle)
        self.view = memoryview((ctypes.c_char * num_bytes).from_address(self.address)).cast("B")
        ctypes.memset(self.address, 0, num_bytes)

    def close(self) -> None:
        """Give the memory back."""
        if self._handle is not None:
            _call("dkx_region_free", self._worker, self._handle)
            self._handle = None


class Endpoint:
    """A connection on which one side writes into the other's memory."""

    def __init__(self, worker: ctypes.c_void_p, address: bytes) -> None:
        self._handle: ctypes.c_void_p | None = _create("dkx_peer_open", worker, address)
        self._keys: list[ctypes.c_void_p] = []

    def open_key(self, packed: bytes) -> ctypes.c_void_p:
        """Unpack the key of a region on the other side; it lives as long as the endpoint."""
        key = _create("dkx_key_open", self._handle, packed)
        self._keys.append(key)
        return key

    def pointer(self, key: ctypes.c_void_p, remote: int) -> int | None:
        """Return where this process itself reaches address `remote` of the other side.

        None means that the other side's memory is not shared with this process.
        """
        pointer: int | None = _library().dkx_key_pointer(key, remote)
        return pointer

    def put(self, key: ctypes.c_void_p, source: int, num_bytes: int, remote: int) -> None:
        """Start writing `num_bytes` from address `source` to address `remote` of the other side.

        The source must not change before `flush` has returned.
        """
        _call("dkx_put", self._handle, key, source, num_bytes, remote)

    def fence(self) -> None:
        """Order all puts before it against all puts after it."""
        _call("dkx_fence", self._handle)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything written is in the other side's memory.

        Raises:
            DeadlineError: it was not within `timeout_s`; the sources are still in use.
            UcxError: the other side is gone.
        """
        _call("dkx_flush", self._handle, _ns(timeout_s))

    def transports(self) -> str:
        """Return the transports that UCX chose for this connection, such as `posix/memory`."""
        description = _blob("dkx_peer_describe", self._handle).decode(errors="replace")
        lanes = re.findall(r"lane\[\d+\]:\s+\d+:([^\s.]+)", description)
        return ", ".join(dict.fromkeys(lanes))

    def close(self, *, force: bool = False, timeout_s: float = 5.0) -> None:
        """Close the connection; `force` does not wait for the other side, which may be dead."""
        if self._handle is None:
            return
        for key in self._keys:
            _library().dkx_key_close(key)
        handle, self._handle = self._handle, None
        _call("dkx_peer_close", handle, int(force), _ns(timeout_s))
