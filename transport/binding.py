"""What the transport needs of UCX, and which binding provides it.

A binding offers a worker, regions that peers write to, and endpoints that write into theirs. They
are closed by hand, in the order endpoints, regions, worker: finalizers would run at moments when
UCX must not be called.
"""

import importlib
import logging
from typing import Any, Literal, NamedTuple, Protocol, Self

from transport.errors import UcxError

log = logging.getLogger(__name__)

Binding = Literal["native", "ucx-py"]
Choice = Literal["native", "ucx-py", "auto"]

_MODULES: dict[Binding, str] = {"native": "transport.native", "ucx-py": "transport.ucx_py"}


class Places(NamedTuple):
    """Where a write goes: addresses on the other side.

    Attributes:
        payload: of the payload.
        header: of the header.
        word: of the 8 bytes that announce them.
        bell: of the bell beside which the reader may sleep.
    """

    payload: int
    header: int
    word: int
    bell: int


class Region(Protocol):
    """Memory allocated by UCX, so that a writer on the same host stores straight into it."""

    @property
    def address(self) -> int:
        """First byte."""

    @property
    def key(self) -> bytes:
        """Packed remote key, for the writers."""

    @property
    def view(self) -> memoryview:
        """The memory itself, zero at first; invalid after `close`."""

    def close(self) -> None:
        """Give the memory back."""


class Endpoint(Protocol):
    """A connection on which one side writes into the other's memory."""

    def open_key(self, packed: bytes) -> Any:
        """Unpack the key of a region on the other side; it lives as long as the endpoint."""

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
        """Write payload and header, then the word that announces them, and flush.

        Whoever sees the word sees all of payload and header: a fence stands between them.

        Args:
            key: key of the region that is written to.
            source: address of the payload, which must not change before it is flushed.
            num_bytes: length of the payload, 0 for none.
            header: a second piece.
            word: value of the 8 bytes that come last.
            to: addresses on the other side.
            timeout_s: as in `flush`.

        Raises:
            DeadlineError, UcxError: as in `flush`.
        """

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was written is in the other side's memory; ring the bell if it can.

        Raises:
            DeadlineError: it was not within `timeout_s`; the sources are still in use.
            UcxError: the other side is gone.
        """

    def describe(self) -> str:
        """Return UCX's own description of the connection and of the protocols of its worker."""

    def close(self, *, force: bool = False, timeout_s: float = 5.0) -> None:
        """Close the connection; `force` does not wait for the other side, which may be dead."""


class Worker(Protocol):
    """A UCX context with one worker, to be used from any thread."""

    @property
    def address(self) -> bytes:
        """What another process needs to connect to this worker."""

    def start_progress(self, bell: int) -> None:
        """Let a sleeping thread progress the worker: what a target of writes needs.

        Args:
            bell: address of the bell that it rings when something has come in (`memory.ring_bell`).
        """

    def stop_progress(self) -> None:
        """End that thread, if there is one; the bell's memory must live until then."""

    def allocate(self, num_bytes: int) -> Region:
        """Allocate memory that peers may write to."""

    def connect(self, address: bytes) -> Endpoint:
        """Return an endpoint to the worker that has this address."""

    def close(self) -> None:
        """Stop progress and destroy the worker; endpoints and regions must be closed before."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *reason: object) -> None: ...


def open_worker(choice: Choice = "auto") -> Worker:
    """Open a worker of a binding and log which one it is.

    Args:
        choice: a binding, or `auto`: the native one if it loads, else ucx-py.

    Raises:
        UcxError: the binding cannot be loaded, or UCX cannot be opened with its settings.
    """
    reasons = []
    for name in _MODULES if choice == "auto" else [choice]:
        module = importlib.import_module(_MODULES[name])
        try:
            library = module.load()
        except UcxError as error:
            log.warning("binding %s cannot be used: %s", name, error)
            reasons.append(str(error))
            continue
        log.info("UCX %s, binding %s", library, name)
        worker: Worker = module.Worker()
        return worker
    raise UcxError("; ".join(reasons))
