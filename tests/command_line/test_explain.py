"""`python -m wholestep explain CODE` prints the page of an error, from a clone and from an installed package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import wholestep
from wholestep.command_line.app import main

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "errors"


@pytest.mark.parametrize("written", ["WS-ITEM", "ws-item", "item", "[WS-ITEM]"])
def test_explain_prints_the_page_of_a_code_however_it_is_written(written: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", written]) == 0
    assert capsys.readouterr().out == (PAGES / "WS-ITEM.md").read_text()


def test_explain_says_which_code_was_meant(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "WS-ITEN"]) == 2
    assert capsys.readouterr().err == "There is no error code WS-ITEN. Did you mean WS-ITEM?\n"


@pytest.mark.parametrize("written", ["index", "../index", "WS-/../../README"])
def test_explain_opens_no_other_file(written: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", written]) == 2
    assert "There is no error code" in capsys.readouterr().err


def test_explain_without_a_code_lists_all(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    codes = {line.split()[0] for line in shown.splitlines()}
    assert codes == {page.stem for page in PAGES.glob("WS-*.md")}
    assert "WS-ITEM" in codes


def test_a_command_that_does_not_exist_names_the_one_that_was_meant(capsys: pytest.CaptureFixture) -> None:
    assert main(["explian"]) == 2
    assert "explain" in capsys.readouterr().err


def test_an_installed_package_has_the_pages(tmp_path: Path) -> None:
    """The files of a wheel, laid out as pyproject.toml tells hatchling to, with no repository around them."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build["packages"] == ["src/wholestep"]
    shutil.copytree(Path(wholestep.__file__).parent, tmp_path / "wholestep", ignore=shutil.ignore_patterns("*.pyc"))
    for source, target in build["force-include"].items():
        shutil.copytree(ROOT / source, tmp_path / target)
    done = subprocess.run(
        [sys.executable, "-m", "wholestep", "explain", "WS-RNG"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == (PAGES / "WS-RNG.md").read_text()
