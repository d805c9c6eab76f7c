"""Bad input: one clear message with the value and the remedy, nothing started or lost."""

import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from command_line import ROOT, TINY, CommandLine

from toolkit.data.tokens import write_tokens

STARTED = ("data.eval_rows=0", "teacher.placement=colocated")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.replica=2", "unknown key teacher.replica; did you mean replicas?"),
        ("run.steps=ten", "run.steps: Input should be a valid integer"),
        ("data.tokens=no/such.bin", "does not exist: make it with `disaggkd prepare`"),
        ("ring.slot_tokens=8", "a micro-batch has 4 x 64 = 256 tokens but ring.slot_tokens = 8"),
    ],
)
def test_refused_before_anything_starts(disaggkd: CommandLine, override: str, message: str) -> None:
    assert message in disaggkd.run("run", override, expect=2)
    assert not (disaggkd.folder / "run").exists()


def _variant(path: Path, **sections: dict[str, Any]) -> Path:
    """Write the tiny example with some sections replaced."""
    tables = tomllib.loads(TINY.read_text(encoding="utf-8")) | sections
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    return path


def test_missing_model(disaggkd: CommandLine, tmp_path: Path) -> None:
    config = _variant(tmp_path / "c.toml", teacher={"path": "no/model"})
    folder = tmp_path / "run"
    output = disaggkd("run", config, "--set", f"run.folder={folder}", expect=2)
    assert "teacher.path = " in output and "no/model is no model" in output
    assert "give a Hugging Face folder" in output
    assert not folder.exists()


def test_token_id_out_of_the_vocabulary(disaggkd: CommandLine, tmp_path: Path) -> None:
    tokens = tmp_path / "t.bin"
    values = np.arange(2000) % 256
    values[1] = 300
    write_tokens(tokens, [values], vocab_size=301)
    meta = tokens.with_suffix(".meta.json")
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"vocab_size": None, "eos_id": 256}))
    output = disaggkd.run("run", f"data.tokens={tokens}", "data.eval_rows=0", steps=50, expect=1)
    assert "has id 300 at token 1, outside the models' vocabulary of 257" in output
    assert "Traceback" not in output


def test_different_vocabularies(disaggkd: CommandLine) -> None:
    output = disaggkd.run("run", "student.config.vocab_size=300", *STARTED, expect=1)
    assert "the student's head has 300 tokens and the teacher's 257" in output
    assert "Traceback" not in output


def test_different_tokenizers(disaggkd: CommandLine, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    for name, words in (("a", ["x", "y"]), ("b", ["y", "x"])):
        (tmp_path / name).mkdir()
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="x"))
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    output = disaggkd.run(
        "run",
        f"teacher.tokenizer={tmp_path / 'a'}",
        f"student.tokenizer={tmp_path / 'b'}",
        *STARTED,
        expect=1,
    )
    assert "the student's tokenizer (" in output and "is not the teacher's (" in output


def test_an_architecture_that_mixes_packed_documents(disaggkd: CommandLine, tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "ffn_dim": 96, "word_embed_proj_dim": 48, "vocab_size": 257}
    student = {"config": {"model_type": "opt", "num_hidden_layers": 2, **sizes}}
    config = _variant(tmp_path / "c.toml", student=student)
    output = disaggkd("run", config, "--set", f"run.folder={tmp_path / 'run'}", expect=1)
    assert "the student (OPTForCausalLM) mixes documents packed into one row" in output
    assert 'data.packing = "none"' in output


def test_run_folder_of_another_configuration(disaggkd: CommandLine) -> None:
    disaggkd.run("run", *STARTED, steps=2)
    kept = (disaggkd.folder / "run" / "config.toml").read_text()
    output = disaggkd.run("run", *STARTED, "optim.lr=0.5", steps=2, expect=2)
    assert "belongs to another configuration:\n  optim.lr: 0.003 there, 0.5 now" in output
    assert (disaggkd.folder / "run" / "config.toml").read_text() == kept


def test_unwritable_run_folder(disaggkd: CommandLine) -> None:
    blocker = disaggkd.folder / "file"
    blocker.write_text("not a folder")
    output = disaggkd.run("file", expect=2)
    assert f"run.folder = {blocker} cannot be written: File exists" in output
    output = disaggkd.run("file/below", expect=2)
    assert "cannot be written: Not a directory" in output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_folder_without_permission(disaggkd: CommandLine) -> None:
    disaggkd.folder.chmod(0o500)
    try:
        assert "Permission denied" in disaggkd.run("run", expect=2)
    finally:
        disaggkd.folder.chmod(0o700)


def test_run_folder_that_others_can_write_to(disaggkd: CommandLine) -> None:
    folder = disaggkd.folder / "run"
    folder.mkdir()
    folder.chmod(0o770)
    output = disaggkd.run("run", expect=2)
    assert f"{folder} can be written by others: chmod go-w it" in output
    assert not (folder / "secret").exists()


def test_a_folder_that_is_no_run(disaggkd: CommandLine, tmp_path: Path) -> None:
    assert "is no run folder: it has no config.toml" in disaggkd("status", tmp_path, expect=2)


def test_prepare_refuses_a_folder_without_tokenizer(disaggkd: CommandLine, tmp_path: Path) -> None:
    shutil.copy(ROOT / "LICENSE", tmp_path / "a.txt")
    output = disaggkd(
        *("prepare", tmp_path / "a.txt", "--tokenizer", tmp_path, "-o", tmp_path / "a.bin"),
        expect=2,
    )
    assert "error: " in output and "tokenizer" in output
    assert not (tmp_path / "a.bin").exists()
