"""What can be checked of a run before any process is started."""

from pathlib import Path

from toolkit.config import Config, ModelSection
from toolkit.errors import InputError


def check_inputs(config: Config) -> None:
    """Refuse a configuration whose files are not there.

    Raises:
        InputError: names the key, the path and what it lacks.
    """
    tokens = Path(config.data.tokens)
    if not tokens.is_file():
        raise InputError(f"data.tokens = {tokens} does not exist: make it with `disaggkd prepare`")
    _check_model("teacher", config.teacher)
    _check_model("student", config.student)


def _check_model(name: str, section: ModelSection) -> None:
    if section.path is not None and not (Path(section.path) / "config.json").is_file():
        raise InputError(
            f"{name}.path = {section.path} is no model: give a Hugging Face folder "
            "(config.json and safetensors); models are never downloaded"
        )
    if section.tokenizer is not None and not Path(section.tokenizer).is_dir():
        raise InputError(f"{name}.tokenizer = {section.tokenizer} is no folder")
