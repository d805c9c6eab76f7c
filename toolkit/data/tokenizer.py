"""The tokenizer of a Hugging Face folder: what the data module needs to know of it."""

import json
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer

from toolkit.errors import InputError


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a folder's tokenizer: `tokenizer.json`, or what transformers can convert to it.

    Raises:
        InputError: if the folder holds no tokenizer, or one that cannot be converted.
    """
    # transformers would look the name of a missing folder up elsewhere.
    if not folder.is_dir():
        raise InputError(f"no tokenizer folder at {folder}")
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            return Tokenizer.from_file(str(path))
        from transformers import AutoTokenizer

        converted: Tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
        return converted
    except Exception as error:  # tokenizers raises no narrower one
        raise InputError(
            f"no tokenizer can be loaded from {folder}: {error}; "
            "name a Hugging Face folder with a tokenizer.json"
        ) from error


def tokenizer_digest(folder: Path) -> str:
    """Return a digest of the vocabulary: every token with its id, added tokens included.

    Raises:
        InputError: if the folder holds no tokenizer.
    """
    return vocabulary_digest(load_tokenizer(folder))


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Return the digest of a loaded tokenizer, see `tokenizer_digest`."""
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return blake2b(json.dumps(vocabulary).encode(), digest_size=16).hexdigest()


def end_of_text_id(tokenizer: Tokenizer, folder: Path, eos_token: str | None = None) -> int:
    """Return the id of the token that ends a document.

    Args:
        tokenizer: the tokenizer of the folder.
        folder: where `tokenizer_config.json` names the token.
        eos_token: the token, instead of the one that is named there.

    Raises:
        InputError: if no token is named, or the tokenizer does not know it.
    """
    token = eos_token or _configured_eos(folder / "tokenizer_config.json")
    if token is None:
        raise InputError(
            f"{folder / 'tokenizer_config.json'} names no eos_token: "
            "give the token that ends a document with --eos-token"
        )
    eos_id = tokenizer.token_to_id(token)
    if eos_id is None:
        raise InputError(
            f"the tokenizer in {folder} has no token {token!r}: "
            "give a token of its vocabulary with --eos-token"
        )
    return eos_id


def _configured_eos(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_bytes()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is no JSON object: {error}; mend it") from error
    # Older files write a token as a table with its properties.
    content: str | None = token.get("content") if isinstance(token, dict) else token
    return content
