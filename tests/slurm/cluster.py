"""A real Slurm on this machine: private daemons, four virtual nodes with two fake GPUs each.

The machine's own Slurm, munge and MariaDB are neither read nor changed.
"""

import argparse
import os
import random
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Self

from daemons import Daemons
from installation import PATH, install

TEMPLATES = Path(__file__).resolve().parent / "etc"
NODES = ("student1", "student2", "teacher1", "teacher2")
READY_TIMEOUT_S = 30


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    """Choose ports below those that the kernel may lend to others while a node is dead."""
    return list(islice(filter(_is_free, random.sample(range(20_000, 32_000), 1_000)), count))


class SlurmCluster:
    """A private Slurm: one controller, the partitions `students` and `teachers`, two nodes each.

    As a context manager it ends even when this process is killed.

    Args:
        folder: Holds everything, and afterwards the logs; short, for the sake of UNIX sockets.
        accounting: Whether slurmdbd, with a MariaDB of its own, serves `sacct`.
    """

    def __init__(self, folder: Path, accounting: bool) -> None:
        self.folder = folder.absolute()
        self.log = self.folder / "log"
        self.accounting = accounting
        self._live = self.folder / "live"
        database = {"MYSQL_UNIX_PORT": str(self._live / "mariadb.socket")}
        self.daemons = Daemons(self._live, self.log, self.env | database)

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, "down", "--at-eof", "--folder", str(self.folder)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self.up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()
        self._guard.communicate()

    @property
    def env(self) -> dict[str, str]:
        """The environment for clients: this process's, less what an outer Slurm put there."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_"))}
        return own | {"SLURM_CONF": str(self._live / "slurm.conf"), "PATH": PATH}

    def run(
        self, *command: str | Path, timeout_s: float = 20.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a client of this cluster; with `check`, an exit code other than 0 raises."""
        done = subprocess.run(
            command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
        return done

    def nodes(self) -> dict[str, str]:
        """Return each node's state as sinfo prints it: idle, mixed, down*, ..."""
        lines = self.run("sinfo", "--Node", "--noheader", "--format=%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def up(self) -> None:
        """Start everything afresh, and return when all nodes are idle."""
        if self.daemons.processes:
            raise RuntimeError(f"the Slurm in {self.folder} is up: take it down first")
        shutil.rmtree(self._live, ignore_errors=True)
        self._lay_out()
        self._start_munge()
        if self.accounting:
            self._start_accounting()
        self._start_controller()
        for name in NODES:
            self._start_slurmd(name)
        self._wait_until(lambda: set(self.nodes().values()) == {"idle"}, "all nodes are idle")

    def down(self) -> None:
        """Kill everything, and remove everything but the logs; can be repeated."""
        self.daemons.kill_all()
        shutil.rmtree(self._live, ignore_errors=True)

    def kill_node(self, name: str) -> None:
        """Let a node die with all that runs on it; the controller has to notice by itself."""
        self.daemons.kill(name)

    def start_node(self, name: str) -> None:
        """Start a killed node, and return when the controller has it back."""
        self._start_slurmd(name)
        self._wait_until(lambda: self.nodes()[name] in ("idle", "mixed"), f"{name} is back")

    def restart_controller(self) -> None:
        """End slurmctld in good order, and start it again from its saved state."""
        self.daemons.stop("slurmctld")
        self._start_controller()
        self._wait_until(lambda: "unknown" not in self.nodes().values(), "all nodes are known")

    @contextmanager
    def silent_controller(self) -> Iterator[None]:
        """Let slurmctld answer nobody, as when it is busy, for the time of a `with` block."""
        controller = self.daemons.processes["slurmctld"]
        controller.suspend()
        try:
            yield
        finally:
            controller.resume()

    def cancel_jobs(self) -> None:
        """Cancel all jobs, and return when none is left."""
        self.run("scancel", "--user=root")
        self._wait_until(lambda: not self.run("squeue", "--noheader").stdout, "no job is left")

    def _wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {READY_TIMEOUT_S} s: {what}; see {self.log}")
            time.sleep(0.05)

    def _lay_out(self) -> None:
        """Write the configuration and the key, and make the fake GPUs."""
        for folder in (self.log, self._live / "state", *(self._live / name for name in NODES)):
            folder.mkdir(parents=True, exist_ok=True)
        values = {
            "host": socket.gethostname().split(".")[0],
            "ports": _free_ports(2 + len(NODES)),
            "storage": "slurmdbd" if self.accounting else "none",
            "live": self._live,
            "log": self.log,
        }
        texts = {file.name: file.read_text().format(**values) for file in TEMPLATES.iterdir()}
        for name, text in {**texts, "munge.key": random.randbytes(64).hex()}.items():
            (self._live / name).write_text(text)
            (self._live / name).chmod(0o600)
        # A fake GPU is a clone of /dev/null: for a plain file no CUDA_VISIBLE_DEVICES is set.
        for index in range(2):
            os.mknod(self._live / f"nvidia{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))

    def _start_munge(self) -> None:
        files = [f"--{kind}-file={self._live}/munge.{kind}" for kind in ("key", "seed", "pid")]
        address = self._live / "munge.socket"
        self.daemons.start("munged", "munged", "-F", "--force", f"--socket={address}", *files)
        self._wait_until(address.exists, "munged listens")

    def _start_accounting(self) -> None:
        common = ["--no-defaults", "--user=root", f"--datadir={self._live}/mariadb"]
        common += [f"--tmpdir={self._live}", "--innodb-log-file-size=8M"]
        root = "--auth-root-authentication-method=normal"
        self.run("mariadb-install-db", *common, root, "--skip-test-db")
        address = self._live / "mariadb.socket"
        options = ["--skip-networking", "--skip-log-bin", "--innodb-flush-log-at-trx-commit=0"]
        self.daemons.start("mariadbd", "mariadbd", *common, *options, f"--socket={address}")
        self._wait_until(address.exists, "mariadbd listens")
        self.daemons.start("slurmdbd", "slurmdbd", "-D")
        self._wait_until(lambda: self._answers("sacctmgr", "show", "cluster"), "slurmdbd answers")

    def _start_controller(self) -> None:
        self.daemons.start("slurmctld", "slurmctld", "-D")
        self._wait_until(lambda: self._answers("scontrol", "ping"), "slurmctld answers")

    def _start_slurmd(self, name: str) -> None:
        self.daemons.start(name, "slurmd", "-D", "-N", name)

    def _answers(self, *command: str) -> bool:
        return self.run(*command, check=False).returncode == 0


def main() -> None:
    """Install a Slurm for tests, or start, show and end one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("command", choices=("install", "up", "down", "status", "env"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "slurm"))
    parser.add_argument("--no-accounting", action="store_true")
    parser.add_argument("--at-eof", action="store_true", help="wait until standard input ends")
    arguments = parser.parse_args()
    if arguments.at_eof:
        sys.stdin.read()
    cluster = SlurmCluster(arguments.folder, not arguments.no_accounting)
    match arguments.command:
        case "install":
            install()
        case "up":
            cluster.up()
        case "down":
            cluster.down()
        case "status":
            print(cluster.run("sinfo", "--Node", "--long").stdout, end="")
        case "env":
            for name in ("SLURM_CONF", "PATH"):
                print(f"export {name}={shlex.quote(cluster.env[name])}")


if __name__ == "__main__":
    main()
