"""Reading TOML that a user wrote."""

import tomllib
from pathlib import Path
from typing import Any

from toolkit.errors import InputError


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a file; `what` names it in messages.

    Raises:
        InputError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error
