"""The choice of the UCX library and its settings; what an import of the package must not do."""

import ctypes
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import libucx
import pytest

import transport
from transport import library, native, rdma
from transport.binding import Choice, open_worker
from transport.errors import UcxError

ROOT = Path(transport.__file__).parents[1]


def run_python(code: str, **environment: str) -> Any:
    """Run code in a process without UCX settings of its own; return the JSON it prints last."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "DISAGGKD_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


APPLY = """
import json, os
from transport.library import apply_settings, ucx_settings
inside = apply_settings(ucx_settings("lo", "posix"))
assert inside == {k: v for k, v in os.environ.items() if k.startswith("UCX_")}
print(json.dumps(inside))
"""


def test_interface_and_transports_are_set() -> None:
    settings = run_python(APPLY)
    assert (settings["UCX_NET_DEVICES"], settings["UCX_TLS"]) == ("lo", "posix")
    assert settings == library.ucx_settings("lo", "posix")


def test_users_own_settings_win() -> None:
    own = {"UCX_NET_DEVICES": "eth7", "UCX_TLS": "tcp", "UCX_RNDV_THRESH": "8k", "UCX_LOG_FILE": ""}
    assert run_python(APPLY, **own) == library.ucx_settings("lo", "posix") | own


ALLOCATE = """
import json, os
from pathlib import Path
from transport.library import apply_settings, ucx_settings
apply_settings(ucx_settings("lo"))
from transport.native import Worker
with Worker() as worker:
    region = worker.allocate(1 << 20)
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    links = {f: os.path.realpath(f) for f in Path("/proc/self/fd").iterdir() if f.is_file()}
    files = [f for f, target in links.items() if target.startswith("/dev/shm/")]
    found = {
        "files": [oct(f.stat().st_mode & 0o777) for f in files],
        "segments": [row for row in rows if row[rows[0].index("cpid")] == str(os.getpid())],
    }
    region.close()
print(json.dumps(found))
"""


def test_shared_memory_is_of_this_user_alone() -> None:
    found = run_python(ALLOCATE)
    assert set(found["files"]) == {"0o600"}
    assert found["segments"] == []
    shared = run_python(ALLOCATE, UCX_TLS="sysv,tcp")["segments"]
    assert {row[2][-3:] for row in shared} == {"660"}  # else the exclusion is needed no more


CONNECT = """
import json, psutil
from transport.library import apply_settings, ucx_settings
apply_settings(ucx_settings("lo", "tcp"))
from transport import native, protocols
with native.Worker() as one, native.Worker() as other:
    endpoint = one.connect(other.address)
    sockets = psutil.Process().net_connections("inet")
    found = {
        "listening": sorted({s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}),
        "transports": protocols.transports(endpoint.describe()),
        "library": native.load(),
    }
    endpoint.close(force=True)
print(json.dumps(found))
"""


def test_ucx_obeys_the_settings() -> None:
    found = run_python(CONNECT)
    assert found["listening"] == ["127.0.0.1"]
    assert found["transports"] == "tcp/lo"
    assert re.match(r"\d+\.\d+\.\d+ from /.*libucp.* \(.+\)$", found["library"])


def test_chosen_library_is_opened(tmp_path: Path) -> None:
    found = library.find_ucx().path
    (tmp_path / "site").symlink_to(found.parent)  # the other libraries lie beside it
    chosen = tmp_path / "site" / found.name
    code = "import json; from transport import native; print(json.dumps(native.load()))"
    opened = run_python(code, DISAGGKD_UCX_LIBRARY=str(chosen))
    assert opened.endswith(f"from {chosen} (DISAGGKD_UCX_LIBRARY)")
    assert opened.split()[0] == run_python(code).split()[0]


def test_chosen_library_must_be_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISAGGKD_UCX_LIBRARY", str(tmp_path / "libucp.so"))
    with pytest.raises(UcxError, match=r"DISAGGKD_UCX_LIBRARY = '.*libucp\.so' is not a file"):
        library.find_ucx()


def test_chosen_library_must_be_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = tmp_path / "libucp.so"
    chosen.write_text("text")
    monkeypatch.setenv("DISAGGKD_UCX_LIBRARY", str(chosen))
    with pytest.raises(UcxError, match="UCX cannot be opened: "):
        native.open_library.__wrapped__()


def test_no_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISAGGKD_UCX_LIBRARY", raising=False)
    monkeypatch.setitem(sys.modules, "libucx", None)  # as if it were not installed
    with pytest.raises(UcxError, match="no UCX: install libucx-cu12, or set DISAGGKD_UCX_LIBRARY"):
        library.find_ucx()


def test_shim_that_is_not_built_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "SHIM", tmp_path / "shim.so")
    monkeypatch.setattr(ctypes, "CDLL", None)
    with pytest.raises(UcxError, match=r"shim\.so is not built: install a C compiler"):
        native.open_library.__wrapped__()


@pytest.fixture
def rdma_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the kernel's list of RDMA devices have an entry."""
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(rdma, "DEVICES", tmp_path / "infiniband")
    monkeypatch.delenv("DISAGGKD_UCX_LIBRARY", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *, verbs: bool) -> Path:
    """Put a libucp into a folder, with or without its module for verbs beside it."""
    (folder / "ucx").mkdir(parents=True)
    for path in (Path(libucx.__file__).parent / "lib").glob("lib*.so.0"):
        shutil.copy(path, folder / (name if path.name == "libucp.so.0" else path.name))
    if verbs:
        (folder / "ucx" / "libuct_ib.so.0").touch()
    return folder / name


def test_wheel_is_taken_where_nothing_has_verbs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rdma_device: None
) -> None:
    system = install(monkeypatch, tmp_path / "system", "libucp.so.0", verbs=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(system.parent))
    path, reason = library.find_ucx()
    assert "libucx" in str(path)
    assert "the RDMA devices of this machine are NOT used" in reason


def test_verbs_are_looked_for_in_the_system_then_in_nixl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rdma_device: None
) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    nixl = install(monkeypatch, tmp_path / "nixl_cu12.libs", "libucp-1.so.0.0.0", verbs=True)
    assert library.find_ucx() == (nixl, "wheel of nixl_cu12 with verbs")
    system = install(monkeypatch, tmp_path / "system", "libucp.so.0", verbs=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(system.parent))
    assert library.find_ucx() == (system, "system library with verbs")


@pytest.mark.parametrize("tls", [None, "^cuda", "rc,self"])
def test_small_limit_of_locked_memory_is_refused_for_rdma(
    monkeypatch: pytest.MonkeyPatch, rdma_device: None, tls: str | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    message = "limit of locked memory is 64 KiB, RDMA needs .* run `ulimit -l unlimited`"
    with pytest.raises(UcxError, match=message):
        rdma.check_memlock(library.ucx_settings("lo", tls))


def test_limit_of_locked_memory_does_not_matter_without_rdma(
    monkeypatch: pytest.MonkeyPatch, rdma_device: None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    rdma.check_memlock(library.ucx_settings("lo", "tcp,cuda_copy"))
    monkeypatch.setattr(rdma, "DEVICES", Path("nowhere"))
    rdma.check_memlock(library.ucx_settings("lo"))


@pytest.mark.parametrize("choice", ["ucx-py", "auto"])
def test_binding_that_is_missing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, choice: Choice
) -> None:
    monkeypatch.setattr(native, "SHIM", tmp_path / "shim.so")
    monkeypatch.setitem(sys.modules, "ucp._libs.ucx_api", None)  # as if it were not installed
    native.open_library.cache_clear()  # else it is open already
    with pytest.raises(UcxError, match=r"ucx-py cannot be imported .*docs/transport\.md"):
        open_worker(choice)


IMPORT = """
import importlib, json, os, sys
from pathlib import Path
before = dict(os.environ)
import transport
names = [f"transport.{path.stem}" for path in Path(transport.__file__).parent.glob("[!_]*.py")]
for name in names:
    importlib.import_module(name)
print(json.dumps({
    "modules": names,
    "torch": "torch" in sys.modules,
    "environment": dict(os.environ) == before,
    "ucx": [line for line in open("/proc/self/maps") if "libuc" in line or "disaggkd_ucx" in line],
}))
"""


def test_import_has_no_side_effects() -> None:
    found = run_python(IMPORT)
    assert {"transport.pool", "transport.service", "transport.native"} <= set(found["modules"])
    assert not found["torch"]
    assert found["environment"]
    assert found["ucx"] == []
