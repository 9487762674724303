"""Links between the pages of the repository lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    assert missing == []


def test_the_page_on_the_layout_names_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[a-z_]+/[a-z_/]*[a-z_]+\.py", text))
    assert len(named) > 15
    assert [
        file for file in sorted(named) if not any((ROOT / top / file).exists() for top in ("", "src/wholestep"))
    ] == []
