"""What mkdocs does not know of this repository: pages beside `docs/`, links to files, lists right behind a sentence.

nav entry `errors/*`                  every page of that folder that the navigation does not name
README.md, CHANGELOG.md, ...          pages of the site, with their links moved
[x](../benchmarks/passes.py)          the file, copied into the site
a list behind a line of text          a blank line between them, which GitHub does not need and Python-Markdown does
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the repository outside of docs/, and where they are in the site."""
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LIST = re.compile(r"^(?=\S)(?![-*] |\d+\. |#|\||>)(.*\S)\n(?=(?:[-*]|1\.) )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    named = set(_named(config.nav or []))
    config.nav = [_expanded(entry, named) for entry in config.nav or []]
    return config


def _named(entries: Iterable[Any]) -> Iterable[str]:
    for entry in entries:
        inside = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [inside] if isinstance(inside, str) else _named(inside)


def _expanded(entry: Any, named: set[str]) -> Any:
    if isinstance(entry, str):
        return entry
    (title, inside), entries = next(iter(entry.items())), []
    if isinstance(inside, str):
        return entry
    for each in inside:
        if isinstance(each, str) and each.endswith("/*"):
            pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob(each + ".md"))
            entries += [page for page in pages if page not in named]
        else:
            entries.append(_expanded(each, named))
    return {title: entries}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_moved(text, source)))
    linked = set()
    for source in [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by)]:
        linked |= {path for path in _targets(source) if not path.startswith("docs/") and path not in PAGES}
    for path in sorted(path for path in linked if (ROOT / path).is_file()):
        files.append(File.generated(config, _in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if not page.file.generated_by:
        markdown = _moved(markdown, f"docs/{page.file.src_uri}")
    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LIST.sub(r"\1\n\n", part) for part in parts)


def on_post_build(config: MkDocsConfig) -> None:
    (Path(config.site_dir) / ".nojekyll").touch()  # GitHub Pages serves the files as they are


def _targets(source: str) -> Iterable[str]:
    """The files of the repository that a page links to."""
    text = _FENCE.sub("", (ROOT / source).read_text(encoding="utf-8"))
    for match in _LINK.finditer(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))


def _moved(text: str, source: str) -> str:
    """The links of a page of the repository, as they are in the site. What is not there stays, and mkdocs warns."""
    here = posixpath.dirname(_in_site(source)) or "."

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if not (ROOT / path).is_file():
            return match[0]
        return f"]({posixpath.relpath(_in_site(path), here)}{match[2] or ''})"

    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in _FENCE.split(text))


def _in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
