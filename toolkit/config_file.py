"""Reading, overriding, comparing and writing configurations."""

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import BaseModel, ValidationError

from toolkit.config import Config
from toolkit.errors import InputError
from toolkit.toml_file import read_toml

PATHS = (
    ("run", "folder"),
    ("data", "tokens"),
    ("teacher", "path"),
    ("teacher", "tokenizer"),
    ("student", "path"),
    ("student", "tokenizer"),
)
"""Keys that hold paths: relative ones count from the working folder."""

LAYOUT = (
    "run.folder",
    "teacher.placement",
    "teacher.replicas",
    "ring",
    "checkpoint",
    "transport",
    "cluster",
)
"""Keys that change where a run computes and what it keeps, but not one bit of what it computes."""


class Change(NamedTuple):
    """One key in which two configurations differ."""

    key: str
    old: Any
    new: Any


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply overrides such as `optim.lr=3e-4`.

    Raises:
        InputError: the file is missing or not TOML, or a key or value is wrong; the message names
            it, and for an unknown key the nearest valid one.
    """
    tables = read_toml(path, "configuration")
    for override in overrides:
        _apply(tables, override)
    return parse_config(_absolute(tables), source=str(path))


def parse_config(tables: dict[str, Any], source: str) -> Config:
    """Validate tables that were read from `source`."""
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        lines = [_describe(item["loc"], item["type"], item["msg"]) for item in error.errors()]
        raise InputError("\n".join([f"{source}:", *(f"  {line}" for line in lines)])) from error


def dump_config(config: Config) -> str:
    """Return the whole configuration as TOML, defaults included."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def changes(old: Config, new: Config) -> list[Change]:
    """Return the keys in which two configurations differ and that change what is computed."""
    before, after = dict(_leaves(old.model_dump())), dict(_leaves(new.model_dump()))
    return [
        Change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and not any(key == layout or key.startswith(f"{layout}.") for layout in LAYOUT)
    ]


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _apply(tables: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"override {override!r} must have the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:  # a bare word is a string: run.folder=runs/a
        value = text
    *sections, name = key.strip().split(".")
    for section in sections:
        tables = tables.setdefault(section, {})
        if not isinstance(tables, dict):
            raise InputError(f"override {override!r}: {section} is no table")
    tables[name] = value


def _absolute(tables: dict[str, Any]) -> dict[str, Any]:
    for section, key in PATHS:
        table = tables.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = str(Path(table[key]).expanduser().absolute())
    return tables


def _describe(location: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(map(str, location))
    if kind == "extra_forbidden":
        return f"unknown key {key}{_suggestion(location)}"
    if kind == "missing":
        return f"{key} is missing"
    return f"{key}: {message.removeprefix('Value error, ')}" if key else message


def _suggestion(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = Config
    for part in location[:-1]:
        field = model.model_fields[str(part)].annotation
        assert isinstance(field, type) and issubclass(field, BaseModel)
        model = field
    valid = sorted(model.model_fields)
    nearest = difflib.get_close_matches(str(location[-1]), valid, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else f"; valid are {', '.join(valid)}"
