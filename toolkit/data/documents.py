"""Documents, read one after the other from text, JSONL and parquet files."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.errors import InputError


def check_readable(path: Path) -> None:
    """Check what can be told of an input before it is read.

    Raises:
        InputError: if the file is missing, of no known kind, or its reader is not installed.
    """
    if not path.is_file():
        raise InputError(f"no input file at {path}")
    if path.suffix not in (".txt", ".md", ".jsonl", ".parquet"):
        raise InputError(
            f"{path} ends in none of .txt, .md, .jsonl and .parquet: rename or convert"
        )
    if path.suffix == ".parquet":
        _parquet_module(path)


def read_documents(path: Path, text_key: str) -> Iterator[str]:
    """Yield the documents of a file that `check_readable` has passed.

    A text file is a document; of a JSONL file every line is one, of a parquet file every row.

    Args:
        path: the file.
        text_key: key (JSONL) or column (parquet) of the text.

    Raises:
        InputError: if the content is not what the suffix says; names the file and the place.
    """
    if path.suffix == ".jsonl":
        return _read_jsonl(path, text_key)
    if path.suffix == ".parquet":
        return _read_parquet(path, text_key)
    return iter([_decode(path.read_bytes(), f"{path}")])


def _read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(_decode(line, place))
            except json.JSONDecodeError as error:
                raise InputError(f"{place} is no JSON: {error}; mend or remove it") from error
            if not isinstance(record, dict):
                raise InputError(f"{place} is no JSON object: {line[:80]!r}; mend or remove it")
            yield _text_of(record, text_key, place)


def _read_parquet(path: Path, text_key: str) -> Iterator[str]:
    parquet = _parquet_module(path)
    try:
        file = parquet.ParquetFile(path)
    except ValueError as error:  # the base of pyarrow's errors on content
        raise InputError(f"{path} cannot be read as parquet: {error}; write it again") from error
    with file:
        names = file.schema_arrow.names
        if text_key not in names:
            raise InputError(f"{path} has no column {text_key!r} but {names}: set --text-key")
        number = 0
        for batch in file.iter_batches(columns=[text_key], batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield _text_of(record, text_key, f"{path}, row {number}")


def _parquet_module(path: Path) -> Any:
    try:
        return import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(
            f"{path} needs pyarrow, which is not installed: pip install disaggkd[parquet]"
        ) from error


def _text_of(record: dict[str, Any], text_key: str, place: str) -> str:
    if text_key not in record:
        raise InputError(f"{place} has no key {text_key!r} but {sorted(record)}: set --text-key")
    text = record[text_key]
    if not isinstance(text, str):
        raise InputError(f"{place} has {text!r} under {text_key!r}, not a text: mend or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a character
        raise InputError(f"{place} is not Unicode: {error}; mend or remove it") from error
    return text


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{place} is not UTF-8: {error}; convert it") from error
