"""Slurm clusters of this machine, shared by all tests of a session."""

import os
from collections.abc import Iterator

import pytest
from cluster import SlurmCluster
from executor_jobs import use
from installation import InstallError, install


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Install Slurm, or skip and say why this machine cannot have it."""
    if os.environ.get("DISAGGKD_SKIP_SLURM") == "1":
        pytest.skip("DISAGGKD_SKIP_SLURM=1")
    try:
        install()
    except InstallError as error:
        pytest.skip(f"no Slurm on this machine: {error}")


@pytest.fixture(scope="session")
def slurm(
    slurm_installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    """A cluster with accounting."""
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), accounting=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_without_accounting(
    slurm_installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    """A cluster on which sacct fails, as on many small ones."""
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), accounting=False) as cluster:
        yield cluster


@pytest.fixture
def client(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster with accounting, used by this process; no job is left in it."""
    use(slurm, monkeypatch)
    yield slurm
    slurm.cancel_jobs()
