"""GPUs and networks, from the table here or from TOML.

Sources: NVIDIA's data sheets of A100, L40S, H100, H200 and B200 (dense bfloat16 rates); memory as
`nvidia-smi` shows it, less than the nominal gigabytes.
"""

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from toolkit.errors import InputError
from toolkit.planner.coefficients import Coefficients
from toolkit.toml_file import read_toml

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: how it is called.
        memory_gib: all of its memory.
        peak_tflops: dense bfloat16 matrix products, 1e12 operations per second.
        is_cpu: whether it is a process without a GPU, and its share of the machine.
    """

    name: str
    memory_gib: float
    peak_tflops: float
    is_cpu: bool = False

    def usable_bytes(self, coefficients: Coefficients) -> float:
        """Return what tensors may take: all, less context and NCCL, less fragmentation."""
        if self.is_cpu:
            return (self.memory_gib - coefficients.process_gib) * GIB
        reserved = coefficients.context_gib + coefficients.nccl_gib
        return (self.memory_gib - reserved) * GIB / (1 + coefficients.fragmentation)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 39.5, 312),
        Gpu("a100-80", 79.25, 312),
        Gpu("l40s-48", 44.5, 362),
        Gpu("h100-80", 79.65, 989),
        Gpu("h200-141", 140.4, 989),
        Gpu("b200-180", 179.0, 2250),
    )
}


_CPU_TFLOPS = 0.1
"""Of a thread; a guess that `calibrate` makes good."""


def this_machine(processes: int, threads: int) -> Gpu:
    """Return the share that each of some processes has of this machine, as if it were a GPU."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Gpu("cpu", memory / GIB / processes, _CPU_TFLOPS * threads, is_cpu=True)


@dataclass(frozen=True)
class Network:
    """What a node has towards the others.

    Attributes:
        ports: of a node.
        gigabits: of a port, in each direction.
        is_rdma: whether hidden states go over RDMA; else over TCP.
    """

    ports: int
    gigabits: float
    is_rdma: bool = True

    def bytes_per_s(self, coefficients: Coefficients) -> float:
        """Return what a node may receive in a second."""
        share = coefficients.rdma_efficiency if self.is_rdma else coefficients.tcp_efficiency
        return self.ports * self.gigabits * 1e9 / 8 * share

    def __str__(self) -> str:
        """Say it as it is given: 8x400, or 1x100tcp."""
        return f"{self.ports}x{self.gigabits:g}{'' if self.is_rdma else 'tcp'}"


NETWORKS = {
    "ethernet-25": Network(1, 25, is_rdma=False),
    "ethernet-100": Network(1, 100, is_rdma=False),
    "infiniband-hdr": Network(8, 200),
    "infiniband-ndr": Network(8, 400),
    "infiniband-xdr": Network(8, 800),
    "efa-p5": Network(32, 100),
}
"""One port for each of eight GPUs; AWS p5 nodes have 32 of 100 Gb/s; Ethernet without RDMA."""


def find_network(text: str, table: Path | None = None) -> Network:
    """Return a network by name, or from text such as `8x400` or, without RDMA, `1x100tcp`.

    A TOML file may add some, each as a table `[network.NAME]`.

    Raises:
        InputError: it is neither, or the file is wrong.
    """
    networks = NETWORKS if table is None else NETWORKS | _read_table(table, "network", Network)
    if text in networks:
        return networks[text]
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)(tcp)?", text)
    if match is None or not int(match[1]) or not float(match[2]):
        raise InputError(
            f"network = {text!r} is not of the form 8x400 (ports of a node x gigabits per second,"
            f" RDMA) or 1x100tcp, nor one of {', '.join(networks)}"
        )
    return Network(int(match[1]), float(match[2]), is_rdma=match[3] is None)


def find_gpu(name: str, table: Path | None = None) -> Gpu:
    """Return a GPU by name; a TOML file may add some, each as a table `[gpu.NAME]`.

    Raises:
        InputError: there is no such GPU, or the file is wrong.
    """
    gpus = GPUS if table is None else GPUS | _read_table(table, "gpu", Gpu)
    if name not in gpus:
        raise InputError(
            f"there is no GPU {name!r}: choose one of {', '.join(gpus)}, or describe it in a TOML"
            f" file as [gpu.{name}]"
        )
    return gpus[name]


_Entry = TypeVar("_Entry", Gpu, Network)


def _read_table(path: Path, kind: str, entry: type[_Entry]) -> dict[str, _Entry]:
    """Return the tables `[kind.NAME]` of a TOML file; each has the numbers of an entry."""
    tables = read_toml(path, "hardware table").get(kind, {})
    keys = [item.name for item in fields(entry) if item.name not in ("name", "is_cpu")]
    for name, values in tables.items():
        numbers = [value for value in values.values() if isinstance(value, int | float)]
        if values.keys() != set(keys) or len(numbers) < len(keys) or min(numbers) < 0:
            raise InputError(f"{path}: [{kind}.{name}] needs the numbers {', '.join(keys)}")
    return {
        name: entry(**({"name": name} if entry is Gpu else {}), **values)
        for name, values in tables.items()
    }
