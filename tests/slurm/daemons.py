"""The daemons of a cluster as process trees that can be found again and that end completely.

Each daemon adopts the orphans among its descendants: step daemons and what jobs leave behind
stay below the node that ran them, whatever they do to their session or environment.
"""

import contextlib
import ctypes
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
END_TIMEOUT_S = 30


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie, which its parent has yet to reap, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def descendants(root: psutil.Process) -> list[psutil.Process]:
    """Return the live processes below a daemon."""
    return list(filter(is_alive, root.children(recursive=True)))


def _await_end(process: psutil.Process) -> None:
    if isinstance(process, psutil.Popen):
        process.wait(END_TIMEOUT_S)
    # Not wait(): where init is slow to reap, that takes as long.
    deadline = time.monotonic() + END_TIMEOUT_S
    while is_alive(process):
        assert time.monotonic() < deadline, f"{process} does not end"
        time.sleep(0.01)


def _kill_tree(root: psutil.Process) -> None:
    """Kill a daemon and its descendants; all stop before one dies, so that none reports it.

    Children die first: a stopped process group that loses its parent is continued by the kernel.
    """
    root.suspend()
    while processes := descendants(root):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in reversed(processes):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
    root.kill()
    _await_end(root)


class Daemons:
    """Daemons by name, recorded in a folder so that another process can end them.

    Args:
        folder: Holds the process numbers and is the daemons' working folder.
        log: Holds what the daemons print.
        env: Their environment; its SLURM_CONF tells them from strangers.
    """

    def __init__(self, folder: Path, log: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._log = log
        self._env = env
        self.processes: dict[str, psutil.Process] = dict(self._recorded())

    def _recorded(self) -> Iterator[tuple[str, psutil.Process]]:
        for file in self._folder.glob("*.daemon"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(file.read_text()))
                # By now the number may be somebody else's.
                if process.environ().get("SLURM_CONF") == self._env["SLURM_CONF"]:
                    yield file.stem, process

    def start(self, name: str, *command: str) -> None:
        """Start a daemon, which must stay in the foreground."""
        assert name not in self.processes, f"{name} runs"
        with open(self._log / f"{name}.out", "ab") as output:
            daemon = psutil.Popen(
                command,
                env=self._env,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_adopt_orphans,
            )
        (self._folder / f"{name}.daemon").write_text(str(daemon.pid))
        self.processes[name] = daemon

    def stop(self, name: str) -> None:
        """End a daemon in good order."""
        process = self.processes.pop(name)
        process.terminate()
        _await_end(process)

    def kill(self, name: str) -> None:
        """Kill a daemon with all its descendants."""
        _kill_tree(self.processes.pop(name))

    def kill_all(self) -> None:
        """Kill all daemons with all their descendants."""
        for name in list(self.processes):
            self.kill(name)
