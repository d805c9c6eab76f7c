"""The choice of the UCX library and its settings; what an import of the package must not do."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import transport
from transport import library
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


def test_transports_are_left_to_ucx() -> None:
    assert "UCX_TLS" not in library.ucx_settings("lo")


CONNECT = """
import json, psutil
from transport.library import apply_settings, ucx_settings
apply_settings(ucx_settings("lo", "tcp"))
from transport import ucx
with ucx.Worker() as one, ucx.Worker() as other:
    endpoint = one.connect(other.address)
    sockets = psutil.Process().net_connections("inet")
    found = {
        "listening": sorted({s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}),
        "transports": endpoint.transports(),
        "version": ucx.version(),
    }
    endpoint.close(force=True)
print(json.dumps(found))
"""


def test_ucx_obeys_the_settings() -> None:
    found = run_python(CONNECT)
    assert found["listening"] == ["127.0.0.1"]
    assert found["transports"] == "tcp/lo"
    assert found["version"].count(".") == 2


def test_chosen_library_is_opened(tmp_path: Path) -> None:
    found = library.find_ucx()
    (tmp_path / "site").symlink_to(found.parent)  # the other libraries lie beside it
    chosen = tmp_path / "site" / found.name
    code = """
import json
from transport import library, ucx
print(json.dumps([str(library.find_ucx()), ucx.version()]))
"""
    path, version = run_python(code, DISAGGKD_UCX_LIBRARY=str(chosen))
    assert path == str(chosen)
    assert version == run_python(code)[1]


def test_chosen_library_must_be_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISAGGKD_UCX_LIBRARY", str(tmp_path / "libucp.so"))
    with pytest.raises(UcxError, match=r"DISAGGKD_UCX_LIBRARY = '.*libucp\.so' is not a file"):
        library.load_ucx()


def test_chosen_library_must_be_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = tmp_path / "libucp.so"
    chosen.write_text("text")
    monkeypatch.setenv("DISAGGKD_UCX_LIBRARY", str(chosen))
    with pytest.raises(UcxError, match="UCX cannot be opened: "):
        library.load_ucx()


def test_no_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISAGGKD_UCX_LIBRARY", raising=False)
    monkeypatch.setitem(sys.modules, "libucx", None)  # as if it were not installed
    with pytest.raises(UcxError, match="no UCX: install libucx-cu12, or set DISAGGKD_UCX_LIBRARY"):
        library.find_ucx()


def test_shim_that_is_not_built_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "SHIM", tmp_path / "shim.so")
    monkeypatch.setattr(ctypes, "CDLL", None)
    with pytest.raises(UcxError, match=r"shim\.so is not built: install the package"):
        library.load_ucx()


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
    assert {"transport.pool", "transport.service", "transport.ucx"} <= set(found["modules"])
    assert not found["torch"]
    assert found["environment"]
    assert found["ucx"] == []
