"""The three floors: imports go down only, and light things stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "transport": {"toolkit", "jobs", "torch", "transformers", "rich", "typer", "submitit"},
    "toolkit": {"jobs", "rich", "typer", "submitit"},
    "jobs": set(),
}


def imported_names(file: Path) -> set[str]:
    """Return the top-level packages that a file imports, at whatever depth."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_down_only(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(ROOT)): imported_names(f) & FORBIDDEN[package] for f in files}
    assert not {file: names for file, names in wrong.items() if names}


@pytest.mark.parametrize(
    "module",
    ["jobs.cli", "jobs.local", "jobs.monitor.app", "jobs.planning.gate", "transport.pool"],
)
def test_light_modules_import_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
