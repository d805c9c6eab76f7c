"""What UCX says of a connection: its transports, and the protocol of its puts.

UCX chooses a protocol for each range of sizes. With UCX_PROTO_INFO=y the description of a worker
holds a table for every kind of operation; UCX before 1.17 tells nothing by default.
"""

import logging
import re
from dataclasses import dataclass

from transport.errors import RefusedError

log = logging.getLogger(__name__)

_RDMA_TRANSPORTS = {"rc_verbs", "rc_mlx5", "dc_mlx5", "srd"}
_EMULATION = "software emulation"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ROW = re.compile(r"\|\s*(\d+)([KMGT]?)\.\.(\w+)\s*\|\s*([^|]+?)\s*\|\s*([^|]+?)\s*\|")


@dataclass(frozen=True)
class PutProtocol:
    """How puts of a range of sizes are done.

    Attributes:
        first_bytes: smallest size.
        last: largest size, in UCX's words.
        method: such as `short`, `zero-copy` or `software emulation`.
        transports: such as `rc_mlx5/mlx5_0:1`.
    """

    first_bytes: int
    last: str
    method: str
    transports: str

    @property
    def is_emulated(self) -> bool:
        """Whether the other side's processor has to take part."""
        return _EMULATION in self.method

    @property
    def is_rdma(self) -> bool:
        """Whether only RDMA transports carry it, without emulation."""
        used = set(re.findall(r"(?:^|\s)(\w+)/", self.transports))
        return bool(used) and used <= _RDMA_TRANSPORTS and not self.is_emulated

    def __str__(self) -> str:
        return f"{self.first_bytes}..{self.last} {self.method} {self.transports}"


def transports(description: str) -> str:
    """Return the transports of a described connection, such as `posix/memory, cma/memory`."""
    lanes = re.findall(r"lane\[\d+\]:\s+\d+:([^\s.]+)", description)
    return ", ".join(dict.fromkeys(lanes))


def put_protocols(description: str, num_bytes: int) -> list[PutProtocol]:
    """Return the protocols that a description names for puts of up to `num_bytes`.

    They are those of the whole worker: of every peer that it has been connected to.
    """
    found: dict[PutProtocol, None] = {}
    is_put = False
    for line in description.splitlines():
        if " by ucp_" in line:
            is_put = "ucp_put" in line
        row = _ROW.search(line)
        if is_put and row is not None:
            number, unit, last, method, config = row.groups()
            found[PutProtocol(int(number) * _UNITS[unit], last, method, config)] = None
    return [protocol for protocol in found if protocol.first_bytes <= num_bytes]


def check_connection(peer: str, description: str, num_bytes: int, *, rdma: bool) -> str:
    """Log how puts to a peer are done, and refuse what must not be used.

    Args:
        peer: its name, for the log.
        description: what UCX says of the connection.
        num_bytes: largest put.
        rdma: whether anything but RDMA is refused.

    Returns:
        The transports of the connection.

    Raises:
        RefusedError: RDMA is required, and UCX chose something else.
    """
    used, protocols = transports(description), put_protocols(description, num_bytes)
    puts = "; ".join(map(str, protocols)) or "not told by this UCX"
    log.info("%s is there, over %s; puts: %s", peer, used, puts)
    if any(protocol.is_emulated for protocol in protocols):
        log.warning("puts to %s are emulated in software, which is slow: %s", peer, puts)
    if rdma and not (protocols and all(protocol.is_rdma for protocol in protocols)):
        raise RefusedError(
            f"transport.require is 'rdma', but UCX's puts are: {puts}; see which library and "
            "settings the teacher's log names, and name the RDMA device in UCX_NET_DEVICES"
        )
    return used
