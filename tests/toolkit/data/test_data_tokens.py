import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.data.tokens import open_tokens, write_tokens
from toolkit.errors import InputError

IDS = np.array([5, 0, 65535, 7, 1], dtype=np.int64)


def write_native(path: Path, ids: Any = IDS, vocab_size: int = 65536) -> None:
    write_tokens(path, [np.asarray(ids)], vocab_size=vocab_size, eos_id=1, tokenizer_digest="abc")


def write_llmc(path: Path, magic: int, version: int, ids: Any, count: int | None = None) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.tobytes())


def write_megatron(path: Path, sequences: list[Any], code: int = 8, version: int = 1) -> None:
    path.write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    sizes = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    pointers = np.cumsum([0, *(s.nbytes for s in sequences[:-1])]).astype("<i8")
    boundaries = np.arange(len(sequences) + 1, dtype="<i8")
    header = struct.pack(
        "<9sQBQQ", b"MMIDIDX\x00\x00", version, code, len(sequences), len(boundaries)
    )
    arrays = sizes.tobytes() + pointers.tobytes() + boundaries.tobytes()
    path.with_suffix(".idx").write_bytes(header + arrays)


def refuses(path: Path, *parts: str) -> None:
    with pytest.raises(InputError, match=".*".join(map(re.escape, parts))):
        open_tokens(path)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32"), (2**18, "uint32")]
)
def test_native_round_trip(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    path = tmp_path / "new" / "corpus.bin"
    chunks = [IDS[:2], IDS[2:2], IDS[2:]]
    write_tokens(path, chunks, vocab_size=vocab_size, eos_id=1, tokenizer_digest="abc")
    file = open_tokens(path)
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.dtype == dtype
    assert file.tokens.tolist() == IDS.tolist()
    assert (file.vocab_size, file.eos_id, file.tokenizer_digest) == (vocab_size, 1, "abc")
    assert {p.name for p in path.parent.iterdir()} == {"corpus.bin", "corpus.meta.json"}


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", ">u4"])
def test_npy(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "corpus.npy", np.array([3, 1, 4], dtype=dtype))
    file = open_tokens(tmp_path / "corpus.npy")
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.tolist() == [3, 1, 4]
    assert (file.vocab_size, file.eos_id, file.tokenizer_digest) == (None, None, None)


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_llmc(tmp_path: Path, magic: int, version: int, dtype: str) -> None:
    path = tmp_path / "corpus.bin"
    write_llmc(path, magic, version, IDS.astype(dtype))
    file = open_tokens(path)
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.tolist() == IDS.tolist()


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron(tmp_path: Path, code: int, dtype: str) -> None:
    path = tmp_path / "corpus.bin"
    write_megatron(path, [IDS[:2].astype(dtype), IDS[2:].astype(dtype)], code)
    file = open_tokens(path)
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.tolist() == IDS.tolist()


def test_missing_file(tmp_path: Path) -> None:
    refuses(tmp_path / "no.bin", "no token file at", "no.bin", "disaggkd prepare")
    refuses(tmp_path, "no token file at")


@pytest.mark.parametrize("content", [b"", b"some text, long enough for a header"])
def test_unknown_format(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "corpus.bin").write_bytes(content)
    refuses(tmp_path / "corpus.bin", "corpus.bin is no known token file", "disaggkd prepare")


def test_unknown_version_of_llmc(tmp_path: Path) -> None:
    write_llmc(tmp_path / "corpus.bin", 20240520, 2, IDS.astype("<u2"))
    refuses(tmp_path / "corpus.bin", "no known token file", "[20240520, 2, 5]")


def test_torn_llmc(tmp_path: Path) -> None:
    write_llmc(tmp_path / "corpus.bin", 20240520, 1, IDS.astype("<u2"), count=6)
    refuses(tmp_path / "corpus.bin", "is torn: 6 tokens of uint16 make 1036 bytes", "has 1034")


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0\0"])
def test_torn_native(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "corpus.bin"
    write_native(path)
    path.write_bytes(change(path.read_bytes()))
    refuses(path, "is torn: 5 tokens of uint16 make 10 bytes", f"has {path.stat().st_size}")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"eos": 1}, "eos"),
    ],
)
def test_bad_meta(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path, meta_path = tmp_path / "corpus.bin", tmp_path / "corpus.meta.json"
    write_native(path)
    meta_path.write_text(json.dumps(json.loads(meta_path.read_text()) | change))
    refuses(path, "corpus.meta.json is no description of a token file")
    with pytest.raises(InputError, match=rf"\n{complaint}\n"):
        open_tokens(path)
    meta_path.write_text("{")
    refuses(path, "corpus.meta.json is no description of a token file")


def test_empty_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(0, dtype=np.uint16))
    write_llmc(tmp_path / "b.bin", 20240520, 1, IDS[:0])
    (tmp_path / "c.bin").write_bytes(b"")
    (tmp_path / "c.meta.json").write_text('{"dtype": "uint16", "num_tokens": 0}')
    for name in ("a.npy", "b.bin", "c.bin"):
        refuses(tmp_path / name, f"{name} is empty: it holds no tokens")


@pytest.mark.parametrize("array", [np.zeros((2, 3), dtype=np.int32), np.zeros(3), np.ones(2, "?")])
def test_npy_of_other_content(tmp_path: Path, array: Any) -> None:
    np.save(tmp_path / "a.npy", array)
    refuses(tmp_path / "a.npy", str(array.shape), str(array.dtype), "one-dimensional")


@pytest.mark.parametrize("num_bytes", [0, 20, 200])
def test_torn_npy(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100))
    path.write_bytes(path.read_bytes()[:num_bytes])
    refuses(path, "a.npy cannot be read as .npy", "write it again")


def test_bad_megatron_indices(tmp_path: Path) -> None:
    path, index = tmp_path / "corpus.bin", tmp_path / "corpus.idx"
    ids = IDS.astype("<u2")
    write_megatron(path, [ids], code=6)
    refuses(path, "version 1 and dtype code 6", "[1, 2, 3, 4, 5, 8]")
    write_megatron(path, [ids], version=2)
    refuses(path, "version 2 and dtype code 8")
    write_megatron(path, [ids])
    index.write_bytes(index.read_bytes() + b"\0")
    refuses(path, "is torn or multimodal: 1 sequences", "make 62 bytes", "has 63")
    index.write_bytes(index.read_bytes()[:20])
    refuses(path, "is no Megatron index")
    write_megatron(path, [ids])
    path.write_bytes(ids[:-1].tobytes())
    refuses(path, "corpus.bin is torn: 5 tokens of uint16 make 10 bytes", "has 8")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    def fails() -> Iterator[Any]:
        yield IDS
        raise RuntimeError("out of disk")

    path = tmp_path / "corpus.bin"
    write_native(path, IDS[:3])
    with pytest.raises(RuntimeError, match="out of disk"):
        write_tokens(path, fails(), vocab_size=65536)
    assert open_tokens(path).tokens.tolist() == IDS[:3].tolist()
    assert {p.name for p in tmp_path.iterdir()} == {"corpus.bin", "corpus.meta.json"}


def test_a_replacement_that_is_cut_off_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corpus.bin"
    write_native(path)
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target == tmp_path / "corpus.meta.json":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_native(path, IDS[::-1])
    refuses(path, "is no known token file")


def test_refused_writes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must end in \.bin, got .*corpus\.npy"):
        write_native(tmp_path / "corpus.npy")
    with pytest.raises(InputError, match=r"no tokens to write to .*corpus\.bin"):
        write_native(tmp_path / "corpus.bin", IDS[:0])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError):
        write_native(tmp_path / "corpus.bin", vocab_size=65535)
