"""The wheel: holds the tree and nothing else, and works from an empty folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transport", "toolkit", "jobs")


def build(folder: Path, **env: str) -> Path:
    """Build the wheel from a copy of what git knows."""
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source],
        # The CUDA library takes a minute, and make env has built it.
        env=os.environ | {"DISAGGKD_CUDA": "0"} | env,
        check=True,
        capture_output=True,
        timeout=100,
    )
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel as it is built here."""
    return build(tmp_path_factory.mktemp("build"))


def test_without_a_compiler_the_loss_runs_in_torch_and_the_ring_is_refused(tmp_path: Path) -> None:
    bare = build(tmp_path, PATH=str(Path(sys.executable).parent))
    site = tmp_path / "site"
    with zipfile.ZipFile(bare) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(site)

    def run(folder: str, placement: str) -> subprocess.CompletedProcess[str]:
        settings = [f"run.folder={tmp_path / folder}", "run.steps=1", "data.eval_rows=0"]
        settings += [f"teacher.placement={placement}"]
        overrides = [word for setting in settings for word in ("--set", setting)]
        return subprocess.run(
            [sys.executable, "-P", "-m", "jobs", "run", ROOT / "examples/tiny.toml", *overrides],
            cwd=ROOT,  # where the example finds its tokens
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=100,
        )

    assert run("colocated", "colocated").returncode == 0
    log = (tmp_path / "colocated/logs/student-0.log").read_text()
    assert "torch, slower; libdisaggkd_rows.so is not built: install g++, then" in log
    refused = run("disaggregated", "disaggregated")
    assert refused.returncode != 0
    message = "libdisaggkd_ucx.so is not built: install a C compiler, then the package again"
    assert message in " ".join((refused.stdout + refused.stderr).split())


def test_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".c", ".h", ".cpp", ".cu", ".json", ".typed")
    }
    libraries = {f"transport/libdisaggkd_{name}.so" for name in ("ucx", "memory")}
    assert found == sources | libraries | {"toolkit/libdisaggkd_rows.so"}
    assert "-py3-none-linux" in wheel.name or "-py3-none-manylinux" in wheel.name


def test_wheel_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import jobs.cli, toolkit.training.trainer, transport.native as native; "
        "from toolkit.losses.backends import row_kernels; row_kernels('native', 'cpu'); "
        "print(native.__file__, native.load())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=empty,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("1", "DISAGGKD_CUDA=1 but there is no nvcc on PATH"),
        ("yes", "DISAGGKD_CUDA=yes: set 1 (must be built), 0 (must not) or nothing"),
    ],
)
def test_refusals_of_a_build_with_cuda(wanted: str, message: str) -> None:
    code = (
        "import shutil; shutil.which = lambda *_, **__: None; import sys; "
        "sys.argv = ['setup.py', '--version']; "
        "import runpy; runpy.run_path('setup.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DISAGGKD_CUDA": wanted},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert message in done.stderr


def test_setup_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--version']; "
        "import runpy; runpy.run_path('setup.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "0.1.0"
