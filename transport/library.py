"""Which UCX library is used and with which settings."""

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from transport.errors import UcxError

SHIM = Path(__file__).with_name("libdisaggkd_ucx.so")


def ucx_settings(interface: str, tls: str | None = None) -> dict[str, str]:
    """Return the UCX environment of a run; docs/transport.md says what each was measured to cure.

    Args:
        interface: network interface that UCX listens on, so that no other network reaches it.
        tls: UCX_TLS, or None to let UCX choose.
    """
    settings = {
        "UCX_NET_DEVICES": interface,
        "UCX_RNDV_THRESH": "inf",
        "UCX_FENCE_MODE": "ep_based",
        "UCX_KEEPALIVE_INTERVAL": "1s",
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    return settings | ({"UCX_TLS": tls} if tls else {})


def apply_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Set the UCX environment of this process; what the user has set already wins.

    UCX reads its environment when it is opened, so this comes before `load_ucx`.

    Returns:
        The settings in force, the user's own UCX variables included.
    """
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")}


def find_ucx() -> Path:
    """Return the libucp to open: `DISAGGKD_UCX_LIBRARY`, else the one of the libucx wheel.

    Raises:
        UcxError: there is none.
    """
    chosen = os.environ.get("DISAGGKD_UCX_LIBRARY")
    if chosen:
        if not Path(chosen).is_file():
            raise UcxError(f"DISAGGKD_UCX_LIBRARY = {chosen!r} is not a file")
        return Path(chosen)
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        raise UcxError(
            "no UCX: install libucx-cu12, or set DISAGGKD_UCX_LIBRARY to a libucp.so.0 of the site"
        )
    return Path(spec.origin).parent / "lib" / "libucp.so.0"


def load_ucx() -> ctypes.CDLL:
    """Open UCX for the whole process and return the shim over it.

    Raises:
        UcxError: the library or the shim cannot be opened.
    """
    if not SHIM.is_file():
        raise UcxError(f"{SHIM.name} is not built: install the package (pip install -e .)")
    try:
        ctypes.CDLL(str(find_ucx()), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(SHIM))
    except OSError as error:
        raise UcxError(f"UCX cannot be opened: {error}") from error
