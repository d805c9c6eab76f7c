"""The documentation: its keys, defaults, commands, paths and links are those of the code."""

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jobs.cli import app
from toolkit.config import Config
from toolkit.config_file import LAYOUT, parse_config
from toolkit.planner.coefficients import documented
from toolkit.planner.facts import read_model
from toolkit.planner.hardware import GIB, find_gpu, find_network
from toolkit.planner.job import Job
from toolkit.planner.plans import make_plans
from transport.layout import HEADER_BYTES, SlotHeader
from transport.library import ucx_settings
from transport.messages import Message

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
FOLDERS = {
    ".ci",
    "transport",
    "toolkit",
    "jobs",
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "scripts",
}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL)


def code(page: Path) -> list[str]:
    """Return what stands in backticks, and every line for the shell."""
    prose = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return re.findall(r"`([^`]+)`", prose) + lines


def rows(page: Path) -> list[list[str]]:
    """Return the cells of every line of every table."""
    lines = [line for line in read(page).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of a configuration with what the code says of it."""
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            yield from settings(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def default_of(field: FieldInfo) -> Any:
    if field.is_required():
        return "required"
    value = field.default
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def documented_default(text: str) -> Any:
    return text if text in ("required", "none") else tomllib.loads(f"value = {text}")["value"]


def test_every_key_is_described_with_its_default() -> None:
    found = [row for row in rows(DOCS / "configuration.md") if "." in row[0]]
    documented = {key: documented_default(default) for key, _, default, _ in found}
    assert len(documented) == len(found)
    assert documented == {key: default_of(field) for key, field in settings(Config)}


def test_keys_that_a_resume_may_change_are_named() -> None:
    introduction = read(DOCS / "configuration.md").partition("\n## ")[0]
    assert [key for key in LAYOUT if f"`{key}`" not in introduction] == []


def test_readme_begins_with_two_commands_and_a_real_result() -> None:
    readme = ROOT / "README.md"
    assert blocks(readme, "sh")[0].splitlines() == ["make demo", "make test"]
    titles = ("KD loss", "perplexity", "top-1 agreement")
    shown = [row for row in rows(readme) if row[0] in titles]
    assert len(shown) == len(titles)
    assert shown == [row for row in rows(DOCS / "results.md") if row[0] in titles]


@every_page
def test_whole_configurations_are_valid(page: Path) -> None:
    for block in blocks(page, "toml"):
        parse_config(tomllib.loads(block), source=page.name)


@every_page
def test_commands_exist(page: Path) -> None:
    targets = re.findall(r"^(\w+):", read(ROOT / "Makefile"), re.MULTILINE)
    commands = [c.callback.__name__ for c in app.registered_commands if c.callback and not c.hidden]
    commands += [group.name or "" for group in app.registered_groups]
    for text in code(page):
        words = [word for word in text.split() if not re.match(r"[A-Z]+=", word)]
        if len(words) > 1 and words[0] in ("make", "disaggkd"):
            assert words[1] in (targets if words[0] == "make" else commands), text


@every_page
def test_paths_exist(page: Path) -> None:
    words = [word for text in code(page) for word in text.split()]
    paths = [w for w in words if w.endswith((".py", ".txt")) or w.partition("/")[0] in FOLDERS]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@every_page
def test_links_resolve(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", read(page)) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_header_of_a_slot_is_as_described() -> None:
    header = SlotHeader(1 << 40, 2, 3, 4, 5, 6, bytes(range(16)), 0.5, checksum=7)
    table = [row for row in rows(DOCS / "transport.md") if row[0].isdigit()]
    end = 0
    for offset, num_bytes, field, _ in table:
        assert int(offset) == end
        end += int(num_bytes)
        value = getattr(header, field, None)
        if isinstance(value, int):
            assert int.from_bytes(header.pack()[int(offset) : end], "little") == value, field
    assert end == HEADER_BYTES


def test_messages_and_ucx_settings_are_described() -> None:
    kinds = {message.model_fields["kind"].default for message in get_args(Message)}
    described = {row[0] for row in rows(DOCS / "transport.md")}
    assert kinds | ucx_settings("lo", "tcp").keys() <= described


@pytest.mark.parametrize("page", ["memory-model", "traffic-model"])
def test_coefficients_are_described_with_their_defaults(page: str) -> None:
    known = {item.name: item for item in documented()}
    other = {"memory-model": "traffic-model", "traffic-model": "memory-model"}[page]
    here, there = (
        [
            row
            for row in rows(DOCS / f"{name}.md")
            if {*row[2:3]} & {"measured", "estimate", "choice"}
        ]
        for name in (page, other)
    )
    assert {row[0] for row in here + there} == known.keys()
    assert len(here + there) == len(known)
    for name, default, tag, meaning in here:
        item = known[name]
        text = "none" if item.default is None else f"{item.default:g}"
        assert (default, tag, meaning) == (text, item.tag, item.meaning)


PAIRS = {
    "35B-A3B to 9B": ("Qwen3.5-35B-A3B", "Qwen3.5-9B"),
    "122B-A10B to 27B": ("Qwen3.5-122B-A10B", "Qwen3.5-27B"),
    "397B-A17B to 35B-A3B": ("Qwen3.5-397B-A17B", "Qwen3.5-35B-A3B"),
    "235B-A22B to 32B": ("Qwen3-235B-A22B", "Qwen3-32B"),
    "405B to 70B": ("Llama-3.1-405B", "Llama-3.1-70B"),
}


def test_pairs_are_planned_as_described() -> None:
    found = [row for row in rows(DOCS / "planning.md") if row[0] in PAIRS]
    assert [row[0] for row in found] == [name for name in PAIRS for _ in range(2)]
    for name, gpus, network, *described in found:
        teacher, student = map(read_model, PAIRS[name])
        student_gpus, teacher_gpus = map(int, gpus.split(" + "))
        hardware = find_gpu("h100-80"), find_network(network)
        job = Job(student, teacher, *hardware, student_gpus, teacher_gpus)
        plans = make_plans(job, choose=True)
        expected = [
            f"{plan.tokens_per_s:,.0f}, {plan.memory.peak / GIB:.1f}" for plan in plans.values()
        ]
        assert described == [*expected, plans["disaggregated"].bound]
