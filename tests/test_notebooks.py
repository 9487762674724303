"""The notebooks of examples/ are stored without outputs, teach in order, and run in a kernel from start to end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_noise_and_explains_its_code(path: Path) -> None:
    data, cells = json.loads(path.read_text(encoding="utf-8")), cells_of(path)
    assert set(data["metadata"]) == {"kernelspec", "language_info"}
    assert [cell["id"] for cell in cells] == [f"cell-{i:02}" for i in range(len(cells))]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all(cell["metadata"] == {} for cell in cells)
    assert "".join(cells[0]["source"]).startswith("# ")
    text = sum(len("".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown")
    assert len(code) > 4
    assert text > 800


def test_each_notebook_leads_to_the_next_and_the_page_lists_all() -> None:
    names = [path.name for path in NOTEBOOKS]
    assert len(names) == 5
    for path, following in zip(NOTEBOOKS[:-1], names[1:], strict=True):
        assert f"]({following})" in "".join(cells_of(path)[-1]["source"])
    page = (EXAMPLES.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert re.findall(r"\(\.\./examples/(\w+\.ipynb)\)", page) == names


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None:
        pytest.skip("nbclient and ipykernel are not installed: make docs")
    import nbclient
    import nbformat

    source = str(EXAMPLES.parent / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output for output in shown if output.output_type == "error"] == []
    if "first" in path.stem:
        assert any("text/html" in output.get("data", {}) for output in shown)
