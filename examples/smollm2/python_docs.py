"""Write the documentation that ships with Python as JSONL, one document a line.

    python examples/smollm2/python_docs.py OUT.jsonl

The topics of the language reference, then the docstrings of the standard library, read from its
source files without importing them.
"""

import ast
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

_SHORTEST = 200
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a source file, long ones only."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # the library's own test data
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text and len(text) >= _SHORTEST:
                yield text


def documents() -> Iterator[str]:
    """Yield every document once, in an order that depends on the Python version alone."""
    seen = set()
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in library.rglob("*.py") if not _LEFT_OUT & set(p.parts))
    texts = [topics[name] for name in sorted(topics)]
    for text in texts + [text for file in files for text in docstrings(file)]:
        cleaned = inspect.cleandoc(text)
        if cleaned not in seen:
            seen.add(cleaned)
            yield cleaned


def main(output: Path) -> None:
    temporary = output.with_name(f".{output.name}.part")
    with temporary.open("w", encoding="utf-8") as stream:
        for text in documents():
            stream.write(json.dumps({"text": text}) + "\n")
    temporary.rename(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
