"""Token files of other tools, mapped and never copied: `.npy`, llm.c, Megatron."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError

Tokens = NDArray[np.integer[Any]]
"""Token ids `[N]`, usually a memmap."""

_LLMC_HEADER_BYTES = 256 * 4
# (magic, version) of GPT-2 and Llama-3 files: karpathy/llm.c, dev/data/data_common.py.
_LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}

# Magic, version, dtype code, number of sequences, number of document boundaries:
# NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def map_tokens(path: Path, dtype: str, num_tokens: int, offset_bytes: int = 0) -> Tokens:
    """Map the token ids `[num_tokens]` that fill a file from an offset to its end.

    Raises:
        InputError: if the file is empty, or shorter or longer than that.
    """
    expected = offset_bytes + num_tokens * np.dtype(dtype).itemsize
    found = path.stat().st_size
    if found != expected:
        raise InputError(
            f"{path} is torn: {num_tokens} tokens of {np.dtype(dtype).name} make {expected} bytes "
            f"but the file has {found}; write or copy it again"
        )
    if num_tokens == 0:
        raise InputError(f"{path} is empty: it holds no tokens")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset_bytes, shape=(num_tokens,))


def map_npy(path: Path) -> Tokens:
    """Map a one-dimensional integer array of numpy's own format.

    Raises:
        InputError: if the file is no such array, or holds no tokens.
    """
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise InputError(f"{path} cannot be read as .npy: {error}; write it again") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{path} has shape {array.shape} and dtype {array.dtype}: "
            "save a one-dimensional array of integers"
        )
    if array.size == 0:
        raise InputError(f"{path} is empty: it holds no tokens")
    return array


def map_llmc(path: Path) -> Tokens:
    """Map the tokens of an llm.c file: a header of 256 int32, then uint16 or uint32.

    Raises:
        InputError: if the header is not llm.c's, or the file is empty or torn.
    """
    header = np.fromfile(path, dtype="<i4", count=3)
    dtype = _LLMC_DTYPES.get(tuple(header[:2].tolist()))
    if dtype is None or header.size < 3:
        raise InputError(
            f"{path} is no known token file: it starts with {header.tolist()}, which is not the "
            "header of an llm.c file, and neither a .meta.json (native) nor an .idx (Megatron) "
            "of the same name lies beside it; make a token file with `disaggkd prepare`"
        )
    return map_tokens(path, dtype, int(header[2]), _LLMC_HEADER_BYTES)


def map_megatron(path: Path, index: Path) -> Tokens:
    """Map the `.bin` of a Megatron dataset: all its sequences, one after the other.

    Raises:
        InputError: if the index is not Megatron's or torn, or disagrees with the `.bin`.
    """
    with index.open("rb") as file:
        header = file.read(_MEGATRON_HEADER.size)
    if len(header) < _MEGATRON_HEADER.size or not header.startswith(_MEGATRON_MAGIC):
        raise InputError(
            f"{index} is no Megatron index: it does not start with {_MEGATRON_MAGIC!r}"
        )
    _, version, code, num_sequences, num_boundaries = _MEGATRON_HEADER.unpack(header)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise InputError(
            f"{index} has version {version} and dtype code {code}: "
            f"only version 1 and the integer codes {sorted(_MEGATRON_DTYPES)} are known"
        )
    # An int32 length and an int64 pointer a sequence, then the int64 boundaries of documents.
    expected = _MEGATRON_HEADER.size + 12 * num_sequences + 8 * num_boundaries
    found = index.stat().st_size
    if found != expected:
        raise InputError(
            f"{index} is torn or multimodal: {num_sequences} sequences and {num_boundaries} "
            f"document boundaries make {expected} bytes but the file has {found}; write it again"
        )
    lengths = np.fromfile(index, dtype="<i4", count=num_sequences, offset=_MEGATRON_HEADER.size)
    return map_tokens(path, _MEGATRON_DTYPES[code], int(lengths.sum(dtype=np.int64)))
