"""No Python of a page is left out: each page is run by a test, those with no test of their own here."""

from __future__ import annotations

import ast
import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from pages import DOCS, blocks_of, run_page
from ranks import run_ranks
from simulate.sharded_steps import fully_sharded

HERE = Path(__file__).parent
RUN_HERE = (
    "architecture.md",
    "concepts.md",
    "passes/chunk_head.md",
    "passes/collective_matmul.md",
    "passes/overlap_communication.md",
)


def pages_with_python() -> Iterator[str]:
    for path in sorted(DOCS.rglob("*.md")):
        if "```python\n" in path.read_text(encoding="utf-8"):
            yield path.relative_to(DOCS).as_posix()


def test_every_page_with_python_is_run_by_a_test() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in sorted(HERE.glob("test_*.py")))
    migrations = [f"migrate/{page}.md" for page in ("functorch", "fx", "pipelining", "spmd")]
    assert f"{['functorch', 'fx', 'pipelining', 'spmd']}".replace("'", '"') in tests
    pages = [page for page in pages_with_python() if not page.startswith("errors/")]
    assert len(pages) > 30
    assert [page for page in pages if f'"{page}"' not in tests and page not in migrations] == []


@pytest.mark.parametrize("page", RUN_HERE)
def test_pages_without_a_test_of_their_own(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_the_pages_of_helpers_of_passes_run_on_a_sharded_step() -> None:
    sharded = fully_sharded(layers=2)
    for block in ws.passes.get_all_comm_blocks(sharded.gm, "reduce_scatter"):
        block.comm_node.target = torch.ops._c10d_functional.all_reduce.default
    printed: list[str] = []
    run_page("passes/comm_blocks.md", lambda shown, out, where: printed.append(out), {"step_graph": sharded})
    assert printed != []


def test_the_page_of_split_optimizers_runs_on_a_step_with_fused_adam() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step(batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = ws.compile(step, lower="eager")
    compiled(torch.randn(2, 4))
    run_page("passes/split_optimizer.md", given={"step_graph": compiled.capture(torch.randn(2, 4))})


class Loss:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Model(nn.Linear):
    def forward(self, x: Tensor) -> Loss:  # type: ignore[override]
        return Loss(super().forward(x).square().mean())


def test_the_lines_of_the_readme_run() -> None:
    """The first block as it is; the second on two ranks, with the step of the first."""

    def code(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        model = Model(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
            "loader": [{"x": torch.randn(2, 4)} for _ in range(2)],
            "world_size": dist.get_world_size(),
            "init_device_mesh": init_device_mesh,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WHOLESTEP_LOWER", "eager")
            shown: list[str] = []
            run_page("../README.md", lambda expected, printed, where: shown.append(printed), given)
        assert "StepGraph" in shown[0]

    run_ranks(code, 2, deadline=60)


def test_every_fragment_of_an_error_page_is_python() -> None:
    """Examples run in tests/test_examples.py, what to write instead in test_fixes_of_error_pages.py."""
    for path in sorted((DOCS / "errors").glob("*.md")):
        for block in blocks_of(path.read_text(encoding="utf-8")):
            code = textwrap.dedent(block.code)
            with contextlib.suppress(SyntaxError):
                ast.parse(code)
                continue
            ast.parse(f"def step():\n{block.code}")
