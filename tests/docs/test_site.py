"""The navigation of the site and the files agree, without building it: `make docs` builds it and checks each link."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import wholestep as ws

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BESIDE = {"readme.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages that docs/site/hooks.py takes in from the repository."""


def navigation() -> list[str]:
    """The pages that the navigation names, `errors/*` among them."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r"^ +- (?:[^:\n]+: )?([\w./-]+(?:\.md|/\*))$", text, re.MULTILINE)


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    entries, pages = navigation(), {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(entries) > 40
    assert len(entries) == len(set(entries))
    named = {entry for entry in entries if entry.endswith(".md")}
    folders = [entry.removesuffix("*") for entry in entries if entry.endswith("*")]
    assert named - pages == set(BESIDE)
    assert [page for page in sorted(pages - named) if not page.startswith(tuple(folders))] == []
    assert all((ROOT / source).is_file() for source in BESIDE.values())


def test_every_public_module_has_a_reference_page_and_every_entry_exists() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md"))]
    entries = re.findall(r"^::: wholestep\.([\w.]+)$", "\n".join(pages), re.MULTILINE)
    old_names = {"compat"}
    documented = {entry.partition(".")[0] for entry in entries}
    modules = {name for name in ws.__all__ if isinstance(getattr(ws, name), ModuleType)} - old_names
    assert modules - documented == set()
    for entry in entries:
        found: object = ws
        for name in entry.split("."):
            found = getattr(found, name)


def test_the_pictures_of_the_concepts_are_those_of_the_script() -> None:
    spec = importlib.util.spec_from_file_location("concept_pictures", DOCS / "site" / "concept_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name, draw in pictures.ALL.items():
        assert (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == draw().svg()


@pytest.mark.long  # some ten seconds; `make docs` is the same
def test_the_site_builds_without_a_warning_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs-material and mkdocstrings are not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    asked = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["'](https?://[^"']+)""")
    found = {url for page in tmp_path.rglob("*.html") for url in asked.findall(page.read_text(encoding="utf-8"))}
    assert {url for url in found if "canonical" not in url} == set()
    assert 'class="doc doc-heading"' in (tmp_path / "reference" / "steps.html").read_text(encoding="utf-8")
    shutil.rmtree(tmp_path)
