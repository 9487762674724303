"""`docs/files.md`, written by `python tests/file_index.py`: every file with the first sentence of its docstring."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "wholestep"
PAGE = ROOT / "docs" / "files.md"
START = """# Every file in one sentence

Written from the docstrings by `python tests/file_index.py`.
[How the code is laid out](architecture.md) walks a step through the packages.
"""


def sentences() -> dict[Path, str]:
    """The first sentence of each file's docstring. `compat/` keeps the names of torch's files: those are its index."""
    files = sorted(path for path in SOURCE.rglob("*.py") if "compat" not in path.relative_to(SOURCE).parts)
    return {path.relative_to(SOURCE): _first_sentence(_docstring(path.read_text())) for path in files}


def _docstring(text: str) -> str:
    """The docstring at the head of a module: the files of the whole package are not parsed for their first lines."""
    if not text.startswith('"""'):
        return ast.get_docstring(ast.parse(text)) or ""
    return inspect.cleandoc(ast.literal_eval(text[: text.index('"""', 3) + 3]))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def page() -> str:
    parts = [START]
    found = sentences()
    in_order = sorted(found, key=lambda path: (path.parent.parts, path.name))
    for folder, files in groupby(in_order, key=lambda path: path.parent):
        title = f"`wholestep/{folder}/`" if folder.parts else "`wholestep/`"
        lines = [f"- `{path.name}`: {found[path]}" for path in files if path.name != "__init__.py"]
        parts.append("\n".join([f"## {title}", "", found.get(folder / "__init__.py", ""), "", *lines]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
