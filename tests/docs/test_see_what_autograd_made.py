"""The page on AOT graphs runs, and prints what it shows."""

from __future__ import annotations

import pytest
import torch

from pages import run_page
from wholestep.compilers import backends

pytestmark = pytest.mark.compiles


def test_every_block_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry

    torch._dynamo.reset()
    if "ws_debug" not in registry.list_backends(exclude_tags=()):  # a machine where nothing can be installed
        monkeypatch.setitem(registry._BACKENDS, "ws_debug", None)
        monkeypatch.setitem(registry._COMPILER_FNS, "ws_debug", backends.ws_debug)
    run_page("see-what-autograd-made.md")
