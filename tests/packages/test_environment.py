"""`make env` installs exactly what constraints.txt says: no package of another project moves torch."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
IS_MADE = (Path(sys.prefix) / ".stamp").exists()
"""This interpreter belongs to an environment that `make env` finished."""


def pins() -> dict[str, str]:
    """Of what `make env` installs; what `make docs` adds stands below."""
    lines = CONSTRAINTS.read_text().partition("# Only what `make docs`")[0].splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.skipif(not IS_MADE, reason="not the environment of `make env`")
def test_torch_is_the_pinned_version() -> None:
    assert torch.__version__.split("+")[0] == pins()["torch"]


@pytest.mark.skipif(not IS_MADE, reason="not the environment of `make env`")
@pytest.mark.parametrize("package", sorted(pins()))
def test_every_installed_package_is_the_pinned_version(package: str) -> None:
    assert version(package).split("+")[0] == pins()[package]


@pytest.mark.skipif(not IS_MADE, reason="not the environment of `make env`")
def test_torchvision_is_not_installed_beside_the_cpu_build_of_torch() -> None:
    if torch.version.cuda is None:
        assert "torchvision" not in {package.lower() for package in _installed()}


def _installed() -> set[str]:
    from importlib.metadata import distributions

    return {each.metadata["Name"] for each in distributions()}
