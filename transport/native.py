"""The binding of our own: ctypes over a thin C library, which opens any libucp at run time.

Every call that can take long releases the GIL.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from transport.binding import Places
from transport.errors import DeadlineError, UcxError
from transport.handles import Handle
from transport.library import find_ucx
from transport.memory import REMEDY

SHIM = Path(__file__).with_name("libdisaggkd_ucx.so")

_HANDLE = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_NS = ctypes.c_int64
_STATUS = ctypes.c_int
_REMOTE = ctypes.c_uint64
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
    "dkx_key_close": (None, [_HANDLE]),
    "dkx_write": (
        _STATUS,
        [
            *(_HANDLE, _HANDLE, _HANDLE, _SIZE, _REMOTE),
            *(ctypes.c_char_p, _SIZE, _REMOTE),
            *(ctypes.c_uint64, _REMOTE, _REMOTE, _NS),
        ],
    ),
    "dkx_flush": (_STATUS, [_HANDLE, _NS]),
}
_TIMEOUT_STATUS = -1000
_BLOB_BYTES = 1 << 16


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def load() -> str:
    """Open UCX and the C library over it; return which UCX that is, and why.

    Raises:
        UcxError: one of them cannot be opened.
    """
    version = open_library().dkx_version().decode()
    path, reason = find_ucx()
    return f"{version} from {path} ({reason})"


@cache
def open_library() -> ctypes.CDLL:
    """Open UCX for the whole process, and the C library over it.

    Raises:
        UcxError: one of them cannot be opened.
    """
    if not SHIM.is_file():
        raise UcxError(f"{SHIM.name} is not built: {REMEDY}")
    try:
        # The shim links no UCX: its symbols are those that the process has.
        ctypes.CDLL(str(find_ucx().path), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(SHIM))
    except OSError as error:
        raise UcxError(f"UCX cannot be opened: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _call(name: str, *arguments: Any) -> None:
    library = open_library()
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


class Worker(Handle):
    """A worker, see `transport.binding.Worker`."""

    def __init__(self) -> None:
        self._handle: ctypes.c_void_p | None = _create("dkx_worker_open")
        self.address = _blob("dkx_worker_address", self._handle)

    def start_progress(self, bell: int) -> None:
        _call("dkx_progress_start", self._handle, bell)

    def stop_progress(self) -> None:
        if self._handle is not None:
            open_library().dkx_progress_stop(self._handle)

    def allocate(self, num_bytes: int) -> "Region":
        assert self._handle is not None
        return Region(self._handle, num_bytes)

    def connect(self, address: bytes) -> "Endpoint":
        assert self._handle is not None
        return Endpoint(self._handle, address)

    def close(self) -> None:
        if self._handle is not None:
            self.stop_progress()
            open_library().dkx_worker_close(self._handle)
            self._handle = None


class Region:
    """Memory for the writes of peers, see `transport.binding.Region`."""

    def __init__(self, worker: ctypes.c_void_p, num_bytes: int) -> None:
        self._worker = worker
        self._handle: ctypes.c_void_p | None = _create("dkx_region_alloc", worker, num_bytes)
        self.address = int(open_library().dkx_region_address(self._handle))
        self.key = _blob("dkx_region_key", worker, self._handle)
        self.view = memoryview((ctypes.c_char * num_bytes).from_address(self.address)).cast("B")
        ctypes.memset(self.address, 0, num_bytes)

    def close(self) -> None:
        if self._handle is not None:
            _call("dkx_region_free", self._worker, self._handle)
            self._handle = None


class Endpoint:
    """A connection to write over, see `transport.binding.Endpoint`."""

    def __init__(self, worker: ctypes.c_void_p, address: bytes) -> None:
        self._handle: ctypes.c_void_p | None = _create("dkx_peer_open", worker, address)
        self._keys: list[ctypes.c_void_p] = []
        self._header = b""

    def open_key(self, packed: bytes) -> ctypes.c_void_p:
        key = _create("dkx_key_open", self._handle, packed)
        self._keys.append(key)
        return key

    def write(
        self,
        key: ctypes.c_void_p,
        source: int,
        num_bytes: int,
        header: bytes,
        word: int,
        to: Places,
        timeout_s: float,
    ) -> None:
        self._header = header  # must live until it is flushed
        payload = source, num_bytes, to.payload
        last = word, to.word, to.bell, _ns(timeout_s)
        _call("dkx_write", self._handle, key, *payload, header, len(header), to.header, *last)

    def flush(self, timeout_s: float) -> None:
        _call("dkx_flush", self._handle, _ns(timeout_s))

    def describe(self) -> str:
        return _blob("dkx_peer_describe", self._handle).decode(errors="replace")

    def close(self, *, force: bool = False, timeout_s: float = 5.0) -> None:
        if self._handle is None:
            return
        for key in self._keys:
            open_library().dkx_key_close(key)
        handle, self._handle = self._handle, None
        _call("dkx_peer_close", handle, int(force), _ns(timeout_s))
