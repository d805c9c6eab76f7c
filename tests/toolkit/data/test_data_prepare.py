import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.data import prepare as prepare_module
from toolkit.data.prepare import Prepared, prepare
from toolkit.data.tokenizer import load_tokenizer, tokenizer_digest
from toolkit.data.tokens import open_tokens
from toolkit.errors import InputError

EOS, A, CAT, DOG, SAT, RAN = range(1, 7)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "corpus.bin"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refuses(inputs: list[Path], tokenizer: Path, output: Path, *parts: str, **keys: Any) -> None:
    with pytest.raises(InputError, match=".*".join(map(re.escape, parts))):
        prepare(inputs, tokenizer, output, **keys)
    assert not output.parent.exists() or list(output.parent.iterdir()) == []


def test_text_and_jsonl_in_the_given_order(
    tmp_path: Path, tokenizer_folder: Path, output: Path
) -> None:
    inputs = [
        write(tmp_path / "z.jsonl", '{"text": "a dog"}\n\n{"text": "", "n": 1}\n{"text": "ran"}'),
        write(tmp_path / "b.txt", "a cat\nsat"),
        write(tmp_path / "a.md", "dog <eos> ran"),
    ]
    seen: list[tuple[int, int]] = []
    prepared = prepare(
        inputs, tokenizer_folder, output, progress=lambda *counts: seen.append(counts)
    )
    assert prepared == Prepared(num_documents=4, num_tokens=13, dtype="uint16")
    assert seen == [(4, 13)]
    file = open_tokens(output)
    assert file.tokens.tolist() == [A, DOG, EOS, RAN, EOS, A, CAT, SAT, EOS, DOG, EOS, RAN, EOS]
    assert (file.vocab_size, file.eos_id) == (7, EOS)
    assert file.tokenizer_digest == tokenizer_digest(tokenizer_folder)
    assert json.loads(output.with_suffix(".meta.json").read_text())["tokenizer"] == "tokenizer"


def test_other_key_and_end_of_text(tmp_path: Path, tokenizer_folder: Path, output: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"body": "a cat"}')
    prepare([path], tokenizer_folder, output, text_key="body", eos_token="sat")
    assert open_tokens(output).tokens.tolist() == [A, CAT, SAT]
    assert open_tokens(output).eos_id == SAT


def test_groups_of_documents_make_no_difference(
    tmp_path: Path, tokenizer_folder: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_GROUP_CHARACTERS", 8)
    lines = "".join(f'{{"text": "{text}"}}\n' for text in ("a cat", "sat", "a dog ran", "a"))
    seen: list[tuple[int, int]] = []
    path = write(tmp_path / "a.jsonl", lines)
    prepare([path], tokenizer_folder, output, progress=lambda *counts: seen.append(counts))
    assert seen == [(2, 5), (3, 9), (4, 11)]
    expected = [A, CAT, EOS, SAT, EOS, A, DOG, RAN, EOS, A, EOS]
    assert open_tokens(output).tokens.tolist() == expected


def test_truncation_and_padding_of_the_tokenizer_are_off(
    tmp_path: Path, tokenizer_folder: Path, output: Path
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    inputs = [write(tmp_path / "a.txt", "a cat sat"), write(tmp_path / "b.txt", "a")]
    prepare(inputs, tokenizer_folder, output)
    assert open_tokens(output).tokens.tolist() == [A, CAT, SAT, EOS, A, EOS]


def test_a_vocabulary_with_holes_counts_to_its_last_id(
    tmp_path: Path, tokenizer_folder: Path, output: Path
) -> None:
    path = tokenizer_folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["bird"] = 65536
    path.write_text(json.dumps(content))
    prepared = prepare([write(tmp_path / "a.txt", "a bird")], tokenizer_folder, output)
    assert prepared.dtype == "uint32"
    assert open_tokens(output).tokens.tolist() == [A, 65536, EOS]
    assert open_tokens(output).vocab_size == 65537


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"text": "a"}\n{"text": \n', ("a.jsonl, line 2 is no JSON", "mend or remove it")),
        ('{"text": "a"}\n["a"]\n', ("a.jsonl, line 2 is no JSON object", '["a"]')),
        ('\n{"id": 1, "body": "a"}', ("line 2 has no key 'text' but ['body', 'id']", "--text-key")),
        ('{"text": null}', ("line 1 has None under 'text', not a text",)),
        ('{"text": "\\ud800"}', ("line 1 is not Unicode", "surrogates")),
        (b'{"text": "\xff"}', ("line 1 is not UTF-8", "convert it")),
        ('{"text": ""}\n', ("no tokens to write", "corpus.bin", "the input has no text")),
    ],
)
def test_bad_jsonl(
    tmp_path: Path,
    tokenizer_folder: Path,
    output: Path,
    content: str | bytes,
    parts: tuple[str, ...],
) -> None:
    refuses([write(tmp_path / "a.jsonl", content)], tokenizer_folder, output, *parts)


def test_bad_inputs(tmp_path: Path, tokenizer_folder: Path, output: Path) -> None:
    good = write(tmp_path / "good.txt", "a cat")
    cases = {
        tmp_path / "absent.txt": ("no input file at", "absent.txt"),
        write(tmp_path / "a.csv", "a"): ("a.csv ends in none of .txt, .md, .jsonl and .parquet",),
        write(tmp_path / "a.txt", b"\xff\xfe"): ("a.txt is not UTF-8", "convert it"),
    }
    for path, parts in cases.items():
        refuses([good, path], tokenizer_folder, output, *parts)
    refuses([], tokenizer_folder, output, "no tokens to write")
    refuses([good], tmp_path / "absent", output, "no tokenizer folder at", "absent")
    refuses([good], tokenizer_folder, output, "has no token 'bird'", eos_token="bird")


def test_parquet_without_pyarrow(
    tmp_path: Path, tokenizer_folder: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = write(tmp_path / "a.parquet", "")
    refuses([path], tokenizer_folder, output, "a.parquet", "pip install disaggkd[parquet]")


def test_parquet(tmp_path: Path, tokenizer_folder: Path, output: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = ["a cat", "", "sat", "a dog ran"]
    table = pyarrow.table({"id": [1, 2, 3, 4], "text": texts})
    parquet.write_table(table, path, row_group_size=2)
    assert prepare([path], tokenizer_folder, output).num_documents == 3
    expected = [A, CAT, EOS, SAT, EOS, A, DOG, RAN, EOS]
    assert open_tokens(output).tokens.tolist() == expected


def test_bad_parquet(tmp_path: Path, tokenizer_folder: Path, output: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["a", None]}), path)
    refuses([path], tokenizer_folder, output, "a.parquet, row 2 has None under 'text'")
    refuses(
        [path],
        tokenizer_folder,
        output,
        "a.parquet has no column 'body' but ['id', 'text']",
        text_key="body",
    )
    path.write_bytes(path.read_bytes()[:-4])
    refuses([path], tokenizer_folder, output, "a.parquet cannot be read as parquet")
