"""The UCX environment of a run, as the benchmarks use it."""

import paths.root  # noqa: F401  (before transport)

from transport.library import ucx_settings


def quiet_settings(tls: str | None = None) -> dict[str, str]:
    """Return a run's settings for the loopback, without the tables of protocols that it reads."""
    return ucx_settings("lo", tls) | {"UCX_PROTO_INFO": "n"}
