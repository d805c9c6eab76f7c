import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from toolkit.data.tokenizer import end_of_text_id, load_tokenizer, tokenizer_digest
from toolkit.errors import InputError


def test_the_digest_is_of_the_vocabulary(tokenizer_folder: Path) -> None:
    digest = tokenizer_digest(tokenizer_folder)
    path = tokenizer_folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]

    content["model"]["vocab"] = dict(reversed(vocabulary.items()))
    path.write_text(json.dumps(content))
    assert tokenizer_digest(tokenizer_folder) == digest

    content["model"]["vocab"] = vocabulary | {"cat": vocabulary["dog"], "dog": vocabulary["cat"]}
    path.write_text(json.dumps(content))
    assert tokenizer_digest(tokenizer_folder) != digest


def test_the_digest_includes_added_tokens(tokenizer_folder: Path) -> None:
    digest = tokenizer_digest(tokenizer_folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.add_tokens(["bird"])
    tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    assert tokenizer_digest(tokenizer_folder) != digest


def test_a_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("aba").ids == [3, 1]
    digest = tokenizer_digest(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    assert tokenizer_digest(tmp_path) == digest


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer folder at .*absent"):
        tokenizer_digest(tmp_path / "absent")
    with pytest.raises(InputError, match=re.escape(str(tmp_path)) + r"(.|\n)*a tokenizer\.json"):
        tokenizer_digest(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"no tokenizer can be loaded from .* tokenizer\.json"):
        tokenizer_digest(tmp_path)


@pytest.fixture
def loaded(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.mark.parametrize("named", ["<eos>", {"content": "<eos>", "lstrip": False}])
def test_the_configured_end_of_text(
    tokenizer_folder: Path, loaded: Tokenizer, named: object
) -> None:
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert end_of_text_id(loaded, tokenizer_folder) == 1
    assert end_of_text_id(loaded, tokenizer_folder, "cat") == 3


@pytest.mark.parametrize("config", [None, "{}", '{"eos_token": null}'])
def test_no_end_of_text(tokenizer_folder: Path, loaded: Tokenizer, config: str | None) -> None:
    path = tokenizer_folder / "tokenizer_config.json"
    path.unlink()
    if config is not None:
        path.write_text(config)
    with pytest.raises(InputError, match=r"tokenizer_config\.json names no eos_token: .*--eos-tok"):
        end_of_text_id(loaded, tokenizer_folder)
    assert end_of_text_id(loaded, tokenizer_folder, "<eos>") == 1


def test_a_bad_end_of_text(tokenizer_folder: Path, loaded: Tokenizer) -> None:
    with pytest.raises(InputError, match=r"has no token 'bird': .*--eos-token"):
        end_of_text_id(loaded, tokenizer_folder, "bird")
    (tokenizer_folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"tokenizer_config\.json is no JSON object"):
        end_of_text_id(loaded, tokenizer_folder)
