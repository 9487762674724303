"""The rules on files, folders and names of shared/STYLE.md that a program can check."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter, defaultdict
from pathlib import Path

from file_index import PAGE, page, sentences

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "wholestep"
LONGEST = 600
MOST_FILES = 21
"""In one folder, `__init__.py` included."""


def test_no_file_is_longer_than_600_lines() -> None:
    files = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


def test_no_folder_of_the_package_has_more_files_than_a_reader_can_survey() -> None:
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in SOURCE.rglob("*.py"))
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}


def test_a_class_name_is_used_once_in_the_package() -> None:
    places: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.MULTILINE):
            places[name].append(path)
    twice = {path for found in places.values() if len(found) > 1 for path in found}
    places.clear()
    for path in sorted(twice):  # one of them may be in a docstring
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_dotted_name_of_the_package_in_the_pages_exists() -> None:
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts)]
    names = {name for page in pages for name in re.findall(r"\bwholestep(?:\.[a-z_]+){2,}", page.read_text())}
    assert "wholestep.passes.comm_blocks" in names
    assert [name for name in sorted(names) if not exists(name)] == []


def exists(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_index_of_files_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "write it: .venv/bin/python tests/file_index.py"


def test_each_file_says_in_one_sentence_what_is_inside() -> None:
    assert {str(path): text for path, text in sentences().items() if not 10 <= len(text) <= 300} == {}
