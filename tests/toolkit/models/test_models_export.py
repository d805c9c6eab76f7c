import pytest
import torch
from tiny_models import LLAMA, QWEN3_5, random_model

from toolkit.config import ModelSection
from toolkit.errors import InputError
from toolkit.models.export import export_model
from toolkit.models.load import load_model


@pytest.mark.parametrize("config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, QWEN3_5])
def test_exported_folder_loads_with_the_same_weights(config, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "README.md").write_text("not a tokenizer file")
    model = random_model(config)
    folder = tmp_path / "exported"
    export_model(model, folder, tokenizer)
    loaded = load_model(ModelSection(path=str(folder))).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "README.md").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer", "exported"}


def test_refusals_leave_nothing_behind(tmp_path):
    model = random_model(LLAMA)
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="there exists; remove it or export to another folder"):
        export_model(model, tmp_path / "there", None)
    with pytest.raises(InputError, match="absent is no folder"):
        export_model(model, tmp_path / "absent" / "new", None)
    with pytest.raises(InputError, match="there holds no tokenizer files"):
        export_model(model, tmp_path / "new", tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_torn_export_leaves_nothing_behind(tmp_path, monkeypatch):
    model = random_model(LLAMA)

    def tear(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "save_pretrained", tear)
    with pytest.raises(OSError, match="disk full"):
        export_model(model, tmp_path / "exported", None)
    assert list(tmp_path.iterdir()) == []
