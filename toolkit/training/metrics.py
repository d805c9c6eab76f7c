"""Metrics as JSON lines: one writer a file, readers that take what is there."""

import json
import os
import time
from pathlib import Path
from typing import Any

from transport.handles import Handle

Record = dict[str, Any]


class MetricsWriter(Handle):
    """Appends records to a file; a reader never sees half of one that is followed by another."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("ab")
        if self._stream.tell() and not path.read_bytes().endswith(b"\n"):
            self._stream.write(b"\n")  # a process died in the middle of its last line

    def write(self, kind: str, **values: Any) -> None:
        """Append one record; `kind` says which, `time` is added."""
        record = {"kind": kind, "time": round(time.time(), 3), **values}
        self._stream.write(json.dumps(record).encode() + b"\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class MetricsReader:
    """Reads the records that were appended since the last call; torn lines are left for later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Record]:
        """Return the new records; none if the file is not there."""
        try:
            with self._path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < self._offset:
                    self._offset = 0  # replaced by a new file
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [record for line in data[:end].splitlines() if (record := _parse(line)) is not None]


def read_steps(path: Path) -> dict[int, Record]:
    """Return the step records of a run by step; of steps done again after a resume, the last."""
    return {record["step"]: record for record in MetricsReader(path).read() if _is_step(record)}


def _is_step(record: Record) -> bool:
    return record.get("kind") == "step"


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:  # the line at which a process died
        return None
    return record if isinstance(record, dict) else None
