"""Running the command line for real, and looking at what it leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny.toml"
RUN_TIMEOUT_S = 200.0


def shared_memory() -> set[str]:
    """Name UCX's POSIX segments, and the System V segments that no process is attached to."""
    posix = {name for name in os.listdir("/dev/shm") if name.startswith("ucx")}
    lines = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    attached = lines[0].index("nattch")
    return posix | {f"sysv {line[1]}" for line in lines[1:] if line[attached] == "0"}


def _processes(marker: str) -> list[psutil.Process]:
    """Return the live processes whose command line holds `marker`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if marker in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def listening_ports(processes: list[psutil.Process]) -> list[int]:
    """Return the TCP ports that processes use."""
    return [c.laddr.port for p in processes for c in p.net_connections("tcp")]


class CommandLine:
    """Runs `disaggkd` for real, in a folder of its own."""

    def __init__(self, folder: Path, env: Mapping[str, str] = os.environ) -> None:
        self.folder = folder
        self._env = env

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a command; the caller waits for it."""
        return subprocess.Popen(
            [sys.executable, "-m", "jobs", *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self._env, "COLUMNS": "100"},
            # A shell that runs the tests in the background has Ctrl-C ignored in all of them.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def __call__(self, *arguments: str | Path, expect: int = 0) -> str:
        """Run a command to its end and return its output; its exit code must be `expect`."""
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self._stacks()}") from error
        finally:
            process.kill()
            process.wait()
        assert process.returncode == expect, output
        return output

    def _stacks(self) -> str:
        """Return the ends of all logs, with the stacks of the roles that go on."""
        for process in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if " role " in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGQUIT)
        time.sleep(1)
        logs = sorted(self.folder.glob("*/logs/*.log"))
        return "\n".join(f"{log}:\n{log.read_text()[-5000:]}" for log in logs)

    def run_arguments(
        self, name: str, *overrides: str, steps: int = 6, command: str = "run"
    ) -> list[str]:
        """Return the arguments of a short run of the tiny example."""
        settings = [f"run.folder={self.folder / name}", f"run.steps={steps}", *overrides]
        return [command, str(TINY), *(part for item in settings for part in ("--set", item))]

    def run(self, name: str, *overrides: str, steps: int = 6, expect: int = 0) -> str:
        """Run the tiny example for some steps in a run folder of this name."""
        return self(*self.run_arguments(name, *overrides, steps=steps), expect=expect)

    def children(self) -> list[psutil.Process]:
        """Return the live processes that have to do with this folder."""
        return _processes(str(self.folder))

    def role(self, name: str, timeout_s: float = 120.0) -> psutil.Process:
        """Return the process of a role of a run that goes on, as soon as it is there."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for process in self.children():
                if f"role {name}" in " ".join(process.cmdline()):
                    return process
            time.sleep(0.05)
        raise AssertionError(f"no {name} was started")


def wait_for(
    condition: Callable[[], object], timeout_s: float = 120.0, what: str = "the condition"
) -> None:
    """Return when `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come true within {timeout_s} s")


def takes_less(limit_s: float, action: Callable[[], object], tries: int = 5) -> None:
    """Assert that an action takes less than this once: others on the machine only ever add."""
    took_s = []
    for _ in range(tries):
        start_s = time.monotonic()
        action()
        took_s.append(time.monotonic() - start_s)
        if took_s[-1] < limit_s:
            return
    raise AssertionError(f"took {took_s} s, each time more than {limit_s} s")
