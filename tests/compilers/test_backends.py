"""The compilers are backends of torch.compile, found by name in any installation of this package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from compilers.networks import assert_trains_as_in_eager, mlp
from wholestep.compilers import backends

ROOT = Path(__file__).parents[2]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][
    "torch_dynamo_backends"
]

USER = """
import torch
model, x = torch.nn.Linear(2, 2), torch.randn(3, 2)
names = torch._dynamo.list_backends()
assert {names} <= set(names), names
found = torch.compile(model, backend="ws_debug")(x)
found.sum().backward()
assert torch.equal(found, model(x)) and model.weight.grad is not None
print("trained")
"""


def test_every_entry_point_leads_to_a_backend() -> None:
    for name, value in POINTS.items():
        module, attribute = value.split(":")
        assert module == backends.__name__
        assert attribute == name
        assert callable(getattr(backends, attribute))


def test_torch_finds_them_by_name_where_the_package_is_installed(tmp_path: Path) -> None:
    # An installation as pip leaves it, so that the test does not depend on when this one was made.
    info = tmp_path / "wholestep_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wholestep-backends\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"{name} = {value}" for name, value in POINTS.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines, ""]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", USER.replace("{names}", repr(set(POINTS)))],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.endswith("trained\n"), done.stderr


@pytest.mark.parametrize("name", sorted(set(POINTS) - {"ws_fusion"}))
def test_a_backend_trains_as_eager_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    model, inputs = mlp()
    assert_trains_as_in_eager(model, lambda m: torch.compile(m, backend=getattr(backends, name)), inputs)
    if name in ("ws_draw", "ws_dump", "ws_debug_compile"):
        assert any((tmp_path / "wholestep_dumps").iterdir())


def test_fusion_is_a_backend_too() -> None:
    torch._dynamo.reset()
    model, inputs = nn.Linear(3, 2), {"input": torch.randn(4, 3)}
    assert_trains_as_in_eager(model, lambda m: torch.compile(m, backend=backends.ws_fusion), inputs, exact=False)
