"""The binding over ucx-py: its low-level module, whose one-sided operations need no asyncio.

ucx-py brings the UCX that it was built for, has no type stubs, and holds the GIL in most calls. UCX
calls back with the GIL while it holds the worker, hence one lock of Python around every call.
"""

import ctypes
import gc
import importlib
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from transport.binding import Places
from transport.errors import DeadlineError, TransportError, UcxError
from transport.handles import Handle
from transport.memory import ring_bell

_POLL_MS = 100
_IDLE_ROUNDS = 64
_UCS_ERR_CANCELED = -16


def load() -> str:
    """Import ucx-py; return which UCX it uses.

    Raises:
        UcxError: it cannot be imported, or uses another UCX than the chosen one.
    """
    version = ".".join(map(str, _api().get_ucx_version()))
    path, chosen = _loaded_libucp(), os.environ.get("DISAGGKD_UCX_LIBRARY")
    if chosen and Path(chosen).resolve() != path.resolve():
        raise UcxError(
            f"ucx-py uses {path}, not DISAGGKD_UCX_LIBRARY = {chosen}: it finds its UCX by itself, "
            "in LD_LIBRARY_PATH or in the libucx wheel"
        )
    return f"{version} from {path} (that of ucx-py)"


@cache
def _api() -> Any:
    try:
        return importlib.import_module("ucp._libs.ucx_api")
    except ImportError as error:
        raise UcxError(f"ucx-py cannot be imported ({error}); see docs/transport.md") from error


def _exceptions() -> Any:
    return importlib.import_module("ucp._libs.exceptions")


def _loaded_libucp() -> Path:
    with open("/proc/self/maps") as maps:
        return Path(next(line.split()[-1] for line in maps if "/libucp.so" in line))


@contextmanager
def _as_ucx_error(call: str) -> Iterator[None]:
    base = _exceptions().UCXBaseException
    try:
        yield
    except base as error:
        raise UcxError(f"{call}: {error}") from error


class Worker(Handle):
    """A worker, see `transport.binding.Worker`."""

    def __init__(self) -> None:
        api = _api()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        with _as_ucx_error("ucp_init"):
            self._context = api.UCXContext(feature_flags=(api.Feature.RMA, api.Feature.WAKEUP))
            self._worker = api.UCXWorker(self._context)
            self.address = bytes(self._worker.get_address())

    def start_progress(self, bell: int) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(
            target=self._progress, args=(bell,), name="ucx-progress", daemon=True
        )
        self._thread.start()

    def stop_progress(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def allocate(self, num_bytes: int) -> "Region":
        with self._lock:
            return Region(self._context, num_bytes)

    def connect(self, address: bytes) -> "Endpoint":
        return Endpoint(self._worker, self._lock, address)

    def close(self) -> None:
        self.stop_progress()
        self._worker.close()
        self._context.close()

    def _progress(self, bell: int) -> None:
        events = self._worker.init_blocking_progress_mode()
        try:
            poller = select.poll()
            poller.register(events, select.POLLIN)
            has_news = False
            while not self._stopping.is_set():
                with self._lock:
                    self._worker.progress()
                    is_idle = self._worker.arm()
                if has_news:
                    ring_bell(bell)
                    has_news = False
                if is_idle and poller.poll(_POLL_MS):
                    has_news = True
        finally:
            os.close(events)


class Region:
    """Memory for the writes of peers, see `transport.binding.Region`."""

    def __init__(self, context: Any, num_bytes: int) -> None:
        with _as_ucx_error("ucp_mem_map"):
            self._memory = _api().UCXMemoryHandle.alloc(context, num_bytes)
            self.key = bytes(self._memory.pack_rkey())
        self.address: int = self._memory.address
        self.view = _view(self.address, num_bytes)
        ctypes.memset(self.address, 0, num_bytes)

    def close(self) -> None:
        self._memory.close()


class Endpoint:
    """A connection to write over, see `transport.binding.Endpoint`."""

    def __init__(self, worker: Any, lock: threading.Lock, address: bytes) -> None:
        api = _api()
        self._worker, self._lock = worker, lock
        self._keys: list[Any] = []
        self._small = b"", b""
        with lock, _as_ucx_error("ucp_ep_create"):
            self._endpoint = api.UCXEndpoint.create_from_worker_address(
                worker, api.UCXAddress.from_buffer(address), True
            )

    def open_key(self, packed: bytes) -> Any:
        with self._lock, _as_ucx_error("ucp_ep_rkey_unpack"):
            key = self._endpoint.unpack_rkey(_api().PackedRemoteKey.from_buffer(packed))
        self._keys.append(key)
        return key

    def write(
        self,
        key: Any,
        source: int,
        num_bytes: int,
        header: bytes,
        word: int,
        to: Places,
        timeout_s: float,
    ) -> None:
        self._small = header, word.to_bytes(8, sys.byteorder)  # must live until they are flushed
        if num_bytes:
            self._put(key, _view(source, num_bytes), to.payload)
        self._put(key, self._small[0], to.header)
        with self._lock, _as_ucx_error("ucp_worker_fence"):
            self._worker.fence()
        self._put(key, self._small[1], to.word)
        self.flush(timeout_s)  # nobody rings: ucx-py has no ucp_rkey_ptr

    def _put(self, key: Any, source: bytes | memoryview, remote: int) -> None:
        memory = _api().RemoteMemory(key, remote, len(source))
        with self._lock, _as_ucx_error("ucp_put"):
            self._endpoint.raise_on_error()
            memory.put_nbi(source)

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        outcome: list[Exception | None] = []
        with _as_ucx_error("ucp_ep_flush"):
            with self._lock:
                request = self._endpoint.flush(lambda _, error: outcome.append(error))
            while request is not None and not outcome:
                if time.monotonic() > deadline:
                    raise DeadlineError("ucp_ep_flush: deadline passed")
                with self._lock:
                    self._worker.progress()
            if outcome and outcome[0] is not None:
                raise outcome[0]
            self._endpoint.raise_on_error()

    def describe(self) -> str:
        with self._lock:
            return str(self._endpoint.info()) + str(self._worker.info())

    def close(self, *, force: bool = False, timeout_s: float = 5.0) -> None:
        if not self._endpoint.initialized:
            return
        try:
            if not force:  # ucx-py has no deadline here, but needs none where all is written
                self.flush(timeout_s)
        except TransportError:
            force = True
            raise
        finally:
            with self._lock, _as_ucx_error("ucp_ep_close"):
                if force:
                    _mark_as_failed(self._endpoint)
                for key in self._keys:
                    _close_key(key)
                self._endpoint.close()
                for _ in range(_IDLE_ROUNDS):
                    self._worker.progress()


def _close_key(key: Any) -> None:
    """Destroy a key; ucx-py does so after a flush, and not at all where the flush fails."""
    try:
        key.close()
    except _exceptions().UCXBaseException:
        _api()._ucx_remote_mem_finalizer_post_flush(None, None, key)


def _mark_as_failed(endpoint: Any) -> None:
    """Let ucx-py close this endpoint by force, which it does only after an error.

    It keeps the status in memory of C that no attribute tells; its finalizer gets the address.
    """
    finalizers = [item for item in gc.get_referents(endpoint) if isinstance(item, weakref.finalize)]
    details = finalizers[0].peek()
    assert details is not None
    status_address = details[2][3]
    ctypes.c_int8.from_address(status_address).value = _UCS_ERR_CANCELED


def _view(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
