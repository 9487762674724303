"""What the repository shows works: the demo agrees with eager, and the example of each error page raises that error."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest

import demo
import wholestep as ws
from wholestep.errors import all_error_types

PAGES = Path(__file__).parents[1] / "docs" / "errors"
NOT_RAISED_THEMSELVES = {"WS-ERROR", "WS-CAPTURE"}
CODES = [cls.code for cls in all_error_types() if cls.__module__.startswith("wholestep.")]


def test_the_demo_ends_with_two_equal_runs(capsys):
    small = "--steps 4 --layers 1 --heads 2 --width 16 --context 8 --batch 2 --sample 5 --device cpu"
    assert demo.main(small.split()) == 0
    assert "equal to the bit" in capsys.readouterr().out


@pytest.mark.parametrize("code", sorted(set(CODES) - NOT_RAISED_THEMSELVES))
def test_the_example_of_an_error_page_raises_that_error(code):
    text = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    example = re.search(r"## Example\n\n```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    name = f"<example of {code}>"
    linecache.cache[name] = (len(example[1]), None, example[1].splitlines(keepends=True), name)
    with pytest.raises((ws.WholestepError, RuntimeError), match=re.escape(f"[{code}]")):
        exec(compile(example[1], name, "exec"), {"__name__": "example"})
