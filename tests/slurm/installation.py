"""Debian's packages of Slurm, munge and MariaDB."""

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    *("munge", "slurmctld", "slurmd", "slurmdbd", "slurm-client"),
    *("mariadb-server-core", "mariadb-client-core"),
)
BINARIES = ("munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "mariadbd", "my_print_defaults")
PATH = f"/usr/sbin:/sbin:{os.environ['PATH']}"
APT_TIMEOUT_S = 100


class InstallError(RuntimeError):
    """This machine cannot have a Slurm; the message says why."""


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Forbid the packages' installation scripts to start services."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def install() -> None:
    """Install the packages unless they are there.

    Raises:
        InstallError: Not root, no apt-get, or a package that is not to be had.
    """
    if os.geteuid() != 0:
        raise InstallError("not root")
    if all(shutil.which(name, path=PATH) for name in BINARIES):
        return
    if not shutil.which("apt-get"):
        raise InstallError("Slurm is not installed, and there is no apt-get")
    command = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *PACKAGES]
    with _no_service_starts():
        done = subprocess.run(
            # timeout ends the whole process group: apt-get's children hold its lock.
            [
                "timeout",
                str(APT_TIMEOUT_S),
                "sh",
                "-c",
                f"apt-get -qq update && {shlex.join(command)}",
            ],
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode != 0:
        raise InstallError(f"apt-get ended with {done.returncode}: {done.stdout[-500:]}")
