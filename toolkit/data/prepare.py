"""Preparation: text files to one native token file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from toolkit.data.documents import check_readable, read_documents
from toolkit.data.formats import Tokens
from toolkit.data.tokenizer import end_of_text_id, load_tokenizer, vocabulary_digest
from toolkit.data.tokens import write_tokens

# Enough to keep the tokenizer's threads busy, little enough for any machine's memory.
_GROUP_CHARACTERS = 4 * 2**20


@dataclass(frozen=True)
class Prepared:
    """What a preparation has written."""

    num_documents: int
    num_tokens: int
    dtype: str


def prepare(
    inputs: Sequence[Path],
    tokenizer: Path,
    output: Path,
    *,
    text_key: str = "text",
    eos_token: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Tokenize documents in the given order into a native token file.

    No special tokens are added but the end-of-text token after each document; those that are
    written out in the text are taken as such, so that chat templates survive. Empty documents
    are left out.

    Args:
        inputs: `.txt` and `.md` files (a file is a document), `.jsonl` and `.parquet` files.
        tokenizer: a Hugging Face folder with the models' tokenizer.
        output: the `.bin` to write; its `.meta.json` comes beside it.
        text_key: key or column of the text in JSONL and parquet files.
        eos_token: end-of-text token, instead of the tokenizer's own.
        progress: called with the numbers of documents and tokens so far.

    Raises:
        InputError: if an input or the tokenizer cannot be read, or there is no text at all.
    """
    for path in inputs:
        check_readable(path)
    loaded = load_tokenizer(tokenizer)
    # Files written for training a model may cut every text at its context length.
    loaded.no_truncation()
    loaded.no_padding()
    eos_id = end_of_text_id(loaded, tokenizer, eos_token)
    num_documents = num_tokens = 0

    def chunks() -> Iterator[Tokens]:
        nonlocal num_documents, num_tokens
        for group in _groups(text for path in inputs for text in read_documents(path, text_key)):
            encodings = loaded.encode_batch_fast(group, add_special_tokens=False)
            documents = [[*encoding.ids, eos_id] for encoding in encodings if encoding.ids]
            num_documents += len(documents)
            num_tokens += sum(map(len, documents))
            yield np.fromiter(chain.from_iterable(documents), dtype=np.int64)
            if progress is not None:
                progress(num_documents, num_tokens)

    meta = write_tokens(
        output,
        chunks(),
        # Added tokens may leave holes, so their number would be too small.
        vocab_size=max(loaded.get_vocab(with_added_tokens=True).values()) + 1,
        eos_id=eos_id,
        tokenizer_digest=vocabulary_digest(loaded),
        tokenizer=tokenizer.resolve().name,
    )
    return Prepared(num_documents, meta.num_tokens, meta.dtype)


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield consecutive documents in groups of bounded size."""
    group: list[str] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document) + 1
        if size >= _GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group
