"""Every error code has a page and every page a code, and the message tells the reader all there is to know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wholestep.command_line.app import main
from wholestep.errors import CaptureError, Location, OptionError, WholestepError, all_error_types

PAGES = Path(__file__).parents[1] / "docs" / "errors"
ERROR_TYPES = [cls for cls in all_error_types() if cls.__module__.startswith("wholestep.")]
CODES = [cls.code for cls in ERROR_TYPES]


def page(code: str) -> str:
    return (PAGES / f"{code}.md").read_text(encoding="utf-8")


def test_every_code_has_a_page_and_every_page_a_code():
    assert {path.stem for path in PAGES.glob("*.md")} - {"index"} == set(CODES)


def test_codes_are_stable_words_and_used_once():
    assert len(set(CODES)) == len(CODES)
    assert all(re.fullmatch(r"WS(-[A-Z]+)+", code) for code in CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_page_has_its_code_as_title_and_says_why_and_what_to_do(code):
    text = page(code)
    assert text.startswith(f"# {code}: ")
    assert "\n## Why\n" in text
    assert "\n## What to do\n" in text


@pytest.mark.parametrize("code", sorted(set(CODES) - {"WS-ERROR", "WS-CAPTURE"}))
def test_a_page_shows_an_example_that_is_valid_python_and_names_the_line(code):
    example = re.search(r"## Example\n\n```python\n(.*?)```", page(code), re.DOTALL)
    assert example is not None
    compile(example[1], f"{code}.md", "exec")
    assert code in example[1]


def test_the_index_links_to_every_page_once():
    links = re.findall(r"\]\((WS-[A-Z-]+)\.md\)", page("index"))
    assert sorted(links) == sorted(CODES)


@pytest.mark.parametrize("cls", ERROR_TYPES)
def test_the_message_holds_code_location_node_neighbours_fix_and_link(cls):
    where = Location("/somewhere/train.py", 14, "train_step", "return loss.item()")
    error = cls("it went wrong.", fix="do it right.", node="%mul_3", location=where, around=["%add_2", "%sub_4"])
    lines = [line.strip() for line in str(error).splitlines()]
    assert lines == [
        f"[{cls.code}] it went wrong.",
        "at    /somewhere/train.py:14 in train_step",
        "return loss.item()",
        "node  %mul_3",
        "near  %add_2",
        "%sub_4",
        "fix   do it right.",
        f"docs  python -m wholestep explain {cls.code}",
    ]


@pytest.mark.parametrize("cls", ERROR_TYPES)
def test_the_command_in_the_message_prints_the_page_of_the_code(cls, capsys):
    _, *command = str(cls("it went wrong.")).splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "wholestep"]
    assert main(command[3:]) == 0
    assert capsys.readouterr().out == page(cls.code)


def test_a_part_that_is_not_known_leaves_no_empty_line():
    assert len(str(CaptureError("it went wrong.")).splitlines()) == 2


def test_a_file_under_the_working_directory_is_shown_relative_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(Location(str(tmp_path / "train.py"), 3)) == "train.py:3"


def test_errors_are_value_errors_and_a_wrong_option_is_a_type_error_too():
    assert all(issubclass(cls, ValueError) for cls in [WholestepError, *ERROR_TYPES])
    assert issubclass(OptionError, TypeError)
