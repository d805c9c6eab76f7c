import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<unk>", "<eos>", "a", "cat", "dog", "sat", "ran"]


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A folder with a word-level tokenizer: the id of a word is its place in WORDS."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder
