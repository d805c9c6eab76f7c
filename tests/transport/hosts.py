"""Two hosts: network namespaces of this machine, joined by virtual links."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.spawn import get_executable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from command_line import wait_for
from transport_processes import SPAWN

LINKS = {"fabric": "10.77.1", "office": "10.77.2"}
"""Interfaces of each host, and the network of each."""
_PREFIX = "disaggkd-test"
_LIMIT_S = 30
_RANDOM_WORD, _PASS = (1 << 32) - 4096 + 56, (1 << 32) - 1  # of classic BPF


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    """One of the hosts; `number` is the end of its addresses."""

    namespace: str
    number: int
    python: Path

    def address(self, interface: str) -> str:
        """Return its IPv4 address."""
        return f"{LINKS[interface]}.{self.number}"

    def ip(self, *words: str) -> str:
        """Run `ip` on this host."""
        return _run("ip", "-n", self.namespace, *words)

    def is_up(self, interface: str) -> bool:
        """Say whether an interface can be used, which comes a little after it was taken up."""
        (link,) = json.loads(self.ip("-j", "link", "show", "dev", interface))
        return bool(link["operstate"] == "UP")

    def received(self, interface: str) -> int:
        """Return the bytes that have come in over an interface."""
        (link,) = json.loads(self.ip("-s", "-j", "link", "show", "dev", interface))
        return int(link["stats64"]["rx"]["bytes"])

    def tc(self, *words: str) -> str:
        """Run `tc` on this host."""
        return _run("tc", "-n", self.namespace, *words)

    def delay(self, delay_ms: int) -> None:
        """Let what leaves over the fabric take longer."""
        self.tc("qdisc", "add", "dev", "fabric", "root", "netem", "delay", f"{delay_ms}ms")

    def lose(self, share: float) -> None:
        """Drop this share of the packets that leave over the fabric, at random."""
        threshold = int((1 - share) * (1 << 32))
        program = [
            f"32 0 0 {_RANDOM_WORD}",  # load a random word
            f"53 0 1 {threshold}",  # not below the threshold?
            "6 0 0 2",  # then drop
            f"6 0 0 {_PASS}",
        ]
        bytecode = ",".join([str(len(program)), *program])
        self.tc("qdisc", "add", "dev", "fabric", "clsact")
        self.tc(
            *("filter", "add", "dev", "fabric", "egress"),
            *("bpf", "direct-action", "bytecode", bytecode),
        )

    def dropped(self) -> int:
        """Return how many packets have been dropped on their way to the fabric."""
        disciplines = json.loads(self.tc("-s", "-j", "qdisc", "show", "dev", "fabric"))
        return sum(discipline["drops"] for discipline in disciplines)

    @contextmanager
    def spawning(self) -> Iterator[None]:
        """Start processes on this host instead of here."""
        usual = os.fsdecode(get_executable())
        SPAWN.set_executable(str(self.python))
        try:
            yield
        finally:
            SPAWN.set_executable(usual)

    @contextmanager
    def cut(self, interface: str) -> Iterator[None]:
        """Take an interface down, for the time of a `with` block."""
        self.ip("link", "set", interface, "down")
        try:
            yield
        finally:
            self.ip("link", "set", interface, "up")


def why_not() -> str | None:
    """Return why this machine cannot make hosts, or None."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs the commands ip and tc (package iproute2)"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "delete", probe)
    except OSError as error:
        return f"needs network namespaces: {error}"
    return None


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a link for each of `LINKS`; remove them at the end."""
    _remove_stale()
    one, other = hosts = [_new_host(folder, number) for number in (1, 2)]
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            host.ip("link", "set", "lo", "up")
        for name in LINKS:
            peer = ("peer", "name", name, "netns", other.namespace)
            one.ip("link", "add", name, "type", "veth", *peer)
            for host in hosts:
                host.ip("address", "add", f"{host.address(name)}/24", "dev", name)
                host.ip("link", "set", name, "up")
        for host in hosts:
            for name in LINKS:
                wait_for(partial(host.is_up, name), _LIMIT_S, f"{name} of {host.namespace}")
        yield one, other
    finally:
        for host in hosts:  # their links go with them
            with suppress(OSError):
                _run("ip", "netns", "delete", host.namespace)


def _new_host(folder: Path, number: int) -> Host:
    namespace = f"{_PREFIX}-{os.getpid()}-{number}"
    python = folder / f"python-{number}"
    usual = os.fsdecode(get_executable())
    python.write_text(f'#!/bin/sh\nexec ip netns exec {namespace} "{usual}" "$@"\n')
    python.chmod(stat.S_IRWXU)
    return Host(namespace, number, python)


def _remove_stale() -> None:
    """Remove the hosts of tests that were killed."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition(f"{_PREFIX}-")
        if not prefix and rest and not psutil.pid_exists(int(rest.partition("-")[0])):
            with suppress(OSError):  # another test has been faster
                _run("ip", "netns", "delete", name)
