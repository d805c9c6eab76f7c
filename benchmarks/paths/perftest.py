"""`ucx_perftest`, UCX's own benchmark, from the folder of the libucx wheel."""

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import libucx

_WAIT_S = 30.0
_OVERALL_MIB_PER_S = 5
_LISTENING = "0A"


def put_gibps(
    settings: Mapping[str, str], num_bytes: int, num_messages: int, cores: tuple[int, int]
) -> float:
    """Return the bandwidth of `ucp_put_bw` in GiB/s, client and server pinned to a core each."""
    wheel = Path(libucx.__file__).parent
    environment = os.environ | dict(settings) | {"LD_LIBRARY_PATH": str(wheel / "lib")}
    port = _free_port()
    command = [str(wheel / "bin" / "ucx_perftest"), "-p", str(port), "-f"]
    test = ["-t", "ucp_put_bw", "-s", str(num_bytes), "-n", str(num_messages), "-w", "10"]
    client_core, server_core = map(str, cores)
    server = subprocess.Popen(
        [*command, "-c", server_core],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_listener(port)
        done = subprocess.run(
            [*command, "-c", client_core, "127.0.0.1", *test],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
        )
    finally:
        server.kill()
        server.wait()
    return float(done.stdout.split("\n")[-2].split()[_OVERALL_MIB_PER_S]) / 1024


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _wait_for_listener(port: int) -> None:
    """Wait until something listens on the port; connecting would use up the server's one client."""
    deadline = time.monotonic() + _WAIT_S
    while not any(
        row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port
        for name in ("tcp", "tcp6")
        for row in map(str.split, Path("/proc/net", name).read_text().splitlines()[1:])
    ):
        if time.monotonic() > deadline:
            raise TimeoutError(f"ucx_perftest does not listen on port {port}")
        time.sleep(0.01)
