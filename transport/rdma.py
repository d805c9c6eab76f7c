"""What this machine has for RDMA, and what RDMA needs of it."""

import resource
from collections.abc import Mapping
from pathlib import Path

from transport.errors import UcxError

DEVICES = Path("/sys/class/infiniband")
INTERFACES = Path("/sys/class/net")
_PREFIXES = ("all", "ib", "rc", "ud", "dc", "srd")
_MIN_MEMLOCK_BYTES = 64 << 20
"""UCX's own buffers need tens of MiB, and the ring comes on top; 64 KiB and 8 MiB are defaults."""


def rdma_ports(interface: str) -> list[str]:
    """Return the RDMA ports behind a network interface, as UCX names them: `mlx5_0:1`."""
    folder = INTERFACES / interface
    devices = sorted(path.name for path in (folder / "device" / "infiniband").glob("*"))
    return [f"{device}:{int((folder / 'dev_port').read_text()) + 1}" for device in devices]


def has_rdma_devices() -> bool:
    """Say whether the kernel knows an InfiniBand or RoCE device."""
    return DEVICES.is_dir() and any(DEVICES.iterdir())


def check_memlock(settings: Mapping[str, str]) -> None:
    """Refuse a limit of locked memory under which RDMA cannot register its buffers.

    Args:
        settings: UCX environment in force; one whose UCX_TLS leaves RDMA out needs no limit.

    Raises:
        UcxError: there are RDMA devices, and the limit is too small.
    """
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit_bytes == resource.RLIM_INFINITY or limit_bytes >= _MIN_MEMLOCK_BYTES:
        return
    if has_rdma_devices() and _may_use_rdma(settings.get("UCX_TLS", "all")):
        raise UcxError(
            f"the limit of locked memory is {limit_bytes >> 10} KiB, RDMA needs "
            f"{_MIN_MEMLOCK_BYTES >> 10} KiB and the ring: run `ulimit -l unlimited` before the "
            "start, on Slurm set LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept"
            "=MEMLOCK, or leave RDMA out with transport.tls, for example 'tcp'"
        )


def _may_use_rdma(tls: str) -> bool:
    return tls.startswith("^") or any(name.startswith(_PREFIXES) for name in tls.split(","))
