"""Which UCX library is used and with which settings."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from transport.errors import UcxError
from transport.rdma import has_rdma_devices, rdma_ports

DEFAULT_TLS = "^sysv,cma"
"""All transports but two: the user's group could read and write System V segments, mode 0660; and
UCX would prefer cma, which took twice the CPU of POSIX shared memory at 16 MiB."""
_NIXL_PACKAGES = ("nixl_cu13", "nixl_cu12")
_LOADER_TIMEOUT_S = 30
_ASK_LOADER = """
import ctypes
try:
    ctypes.CDLL("libucp.so.0")
except OSError:
    raise SystemExit
print(next(line.split()[-1] for line in open("/proc/self/maps") if "/libucp.so" in line))
"""


class UcxLibrary(NamedTuple):
    """A libucp, and why it is the one."""

    path: Path
    reason: str


def ucx_settings(interface: str, tls: str | None = None) -> dict[str, str]:
    """Return the UCX environment of a run; docs/transport.md says what each was measured to cure.

    Args:
        interface: network interface that UCX listens on, so that no other network reaches it; the
            RDMA ports behind it are used too.
        tls: UCX_TLS, or None for `DEFAULT_TLS`.
    """
    return {
        "UCX_NET_DEVICES": ",".join([interface, *rdma_ports(interface)]),
        "UCX_RNDV_THRESH": "inf",
        "UCX_FENCE_MODE": "ep_based",
        "UCX_KEEPALIVE_INTERVAL": "1s",
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
        "UCX_PROTO_INFO": "y",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_TLS": tls or DEFAULT_TLS,
    }


def apply_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Set the UCX environment of this process; what the user has set already wins.

    UCX reads its environment when it is opened, so this comes before `open_worker`.

    Returns:
        The settings in force, the user's own UCX variables included.
    """
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")}


def find_ucx() -> UcxLibrary:
    """Return the libucp to open; with RDMA devices one that has verbs comes first.

    Raises:
        UcxError: there is none.
    """
    chosen = os.environ.get("DISAGGKD_UCX_LIBRARY")
    if chosen:
        if not Path(chosen).is_file():
            raise UcxError(f"DISAGGKD_UCX_LIBRARY = {chosen!r} is not a file")
        return UcxLibrary(Path(chosen), "DISAGGKD_UCX_LIBRARY")
    rdma = has_rdma_devices()
    if rdma:
        for library in _libraries_for_rdma():
            if has_verbs(library.path):
                return library
    wheel = _wheel()
    if wheel is None:
        raise UcxError(
            "no UCX: install libucx-cu12, or set DISAGGKD_UCX_LIBRARY to a libucp.so.0 of the site"
        )
    without = "it has no verbs: the RDMA devices of this machine are NOT used"
    return UcxLibrary(wheel, f"libucx wheel; {without}" if rdma else "libucx wheel, no RDMA device")


def has_verbs(libucp: Path) -> bool:
    """Say whether the UCX that a libucp belongs to has its module for InfiniBand and RoCE."""
    folders = [libucp.resolve().parent / "ucx"]
    if "UCX_MODULE_DIR" in os.environ:
        folders.append(Path(os.environ["UCX_MODULE_DIR"]))
    return any(any(folder.glob("libuct_ib.so*")) for folder in folders)


def _libraries_for_rdma() -> Iterator[UcxLibrary]:
    system = _system_library()
    if system is not None:
        yield UcxLibrary(system, "system library with verbs")
    for package in _NIXL_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            site = Path(spec.origin).parents[1]
            for path in site.glob(f"{package}.libs/libucp-*.so*"):
                yield UcxLibrary(path, f"wheel of {package} with verbs")


def _system_library() -> Path | None:
    """Return the libucp that the loader finds by itself, in a process that needs nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK_LOADER],
        capture_output=True,
        text=True,
        timeout=_LOADER_TIMEOUT_S,
    )
    found = done.stdout.split()
    return Path(found[-1]) if found else None


def _wheel() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "lib" / "libucp.so.0"
