"""Token files: a corpus as one flat array of token ids, read through numpy's memmap.

The native format is a `.bin` of uint16 or uint32 (little-endian) with a `.meta.json` beside it.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from toolkit.data.formats import Tokens, map_llmc, map_megatron, map_npy, map_tokens
from toolkit.errors import InputError


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file; what its format does not record is None.

    Attributes:
        path: the file that holds the tokens.
        tokens: token ids `[N]`, a read-only memmap of any integer dtype.
        vocab_size: number of ids of the tokenizer.
        eos_id: id of the end-of-text token, which ends every document.
        tokenizer_digest: see `toolkit.data.tokenizer.tokenizer_digest`.
    """

    path: Path
    tokens: Tokens
    vocab_size: int | None = None
    eos_id: int | None = None
    tokenizer_digest: str | None = None


class TokenMeta(BaseModel):
    """The content of a native file's `.meta.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dtype: Literal["uint16", "uint32"]
    num_tokens: NonNegativeInt
    vocab_size: PositiveInt | None = None
    eos_id: NonNegativeInt | None = None
    tokenizer_digest: str | None = None
    tokenizer: str | None = None
    """Name of the tokenizer, for the reader; nothing depends on it."""


def open_tokens(path: Path) -> TokenFile:
    """Open a token file of any known format, told by its suffix, header and neighbours.

    Raises:
        InputError: if the file is missing, empty, torn or of no known format.
    """
    if not path.is_file():
        raise InputError(f"no token file at {path}: make one with `disaggkd prepare`")
    meta_path = path.with_suffix(".meta.json")
    index_path = path.with_suffix(".idx")
    if path.suffix == ".npy":
        return TokenFile(path, map_npy(path))
    if meta_path.is_file():
        return _open_native(path, meta_path)
    if index_path.is_file():
        return TokenFile(path, map_megatron(path, index_path))
    return TokenFile(path, map_llmc(path))


def _open_native(path: Path, meta_path: Path) -> TokenFile:
    try:
        meta = TokenMeta.model_validate_json(meta_path.read_bytes())
    except ValidationError as error:
        raise InputError(
            f"{meta_path} is no description of a token file: {error}; write it again"
        ) from error
    dtype = np.dtype(meta.dtype).newbyteorder("<").str
    tokens = map_tokens(path, dtype, meta.num_tokens)
    return TokenFile(path, tokens, meta.vocab_size, meta.eos_id, meta.tokenizer_digest)


def write_tokens(
    path: Path,
    chunks: Iterable[Tokens],
    *,
    vocab_size: int,
    eos_id: int | None = None,
    tokenizer_digest: str | None = None,
    tokenizer: str | None = None,
) -> TokenMeta:
    """Write a native token file from chunks of token ids, never leaving a torn one.

    Args:
        path: the `.bin` to write or replace; its folder is made if missing.
        chunks: arrays `[n]` of ids below `vocab_size`, of any integer dtype.
        vocab_size: number of ids; up to 65,536 of them are stored as uint16, else as uint32.
        eos_id: id of the end-of-text token.
        tokenizer_digest: digest of the tokenizer's vocabulary.
        tokenizer: name of the tokenizer.

    Raises:
        InputError: if `path` does not end in `.bin`, or there are no tokens.
    """
    if path.suffix != ".bin":
        raise InputError(f"a token file's name must end in .bin, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    meta_path = path.with_suffix(".meta.json")
    bin_part, meta_part = (p.with_name(f".{p.name}.{os.getpid()}.part") for p in (path, meta_path))
    dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
    try:
        meta = TokenMeta(
            dtype=dtype,
            num_tokens=_write_chunks(bin_part, chunks, dtype, vocab_size),
            vocab_size=vocab_size,
            eos_id=eos_id,
            tokenizer_digest=tokenizer_digest,
            tokenizer=tokenizer,
        )
        if meta.num_tokens == 0:
            raise InputError(f"there are no tokens to write to {path}: the input has no text")
        meta_part.write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")
        # New tokens under an old description would pass for whole if their sizes agree.
        meta_path.unlink(missing_ok=True)
        bin_part.replace(path)
        meta_part.replace(meta_path)
    finally:
        bin_part.unlink(missing_ok=True)
        meta_part.unlink(missing_ok=True)
    return meta


def _write_chunks(path: Path, chunks: Iterable[Tokens], dtype: str, vocab_size: int) -> int:
    num_tokens = 0
    with path.open("wb") as file:
        for chunk in chunks:
            assert chunk.size == 0 or (chunk.min() >= 0 and chunk.max() < vocab_size)
            file.write(chunk.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            num_tokens += chunk.size
    return num_tokens
