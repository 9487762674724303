"""The scripts of examples/gallery run as their first lines say, and what they train gets better."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "examples" / "gallery"
SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py"))
ON_RANKS = {"fsdp", "pipeline"}
SAYS = {
    "nanogpt": ("2 graphs", "Alice "),
    "finetune_lora": ("of the base, 0 changed", "is right"),
    "vit": ("2 graphs", "optimizer has state"),
    "diffusion": ("2 graphs",),
    "fsdp": ("reduce_scatter_tensor", "84,256 of them on this rank", "loaded: as it was"),
    "pipeline": ("1F1B: makespan", "the last of 2 stages"),
}
"""Words that each script prints, beside losses that fall."""


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?:loss|held out|->) (\d+\.\d+)", text)]


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_the_gallery_runs_and_learns(script: str, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if script in ON_RANKS else []
    report = [] if script == "pipeline" else ["--report", str(tmp_path / "step.html")]
    command = [sys.executable, *launcher, str(GALLERY / f"{script}.py"), *report]
    environment = {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [word for word in SAYS[script] if word not in done.stdout] == [], done.stdout
    found = losses(done.stdout)
    assert found[-1] < 0.9 * found[0], done.stdout
    assert not report or (tmp_path / "step.html").stat().st_size < 5e6


def test_the_page_of_the_gallery_lists_every_script_and_each_says_how_it_is_started() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert re.findall(r"\(\.\./examples/gallery/(\w+)\.py\)", page) == list(SAYS)
    assert sorted(SAYS) == SCRIPTS
    for script in SCRIPTS:
        source = (GALLERY / f"{script}.py").read_text(encoding="utf-8")
        assert f"examples/gallery/{script}.py" in (ast.get_docstring(ast.parse(source)) or "")
        assert len(source.splitlines()) < 160
