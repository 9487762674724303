"""`minify`, called as functorch's minifier is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from wholestep.debug.minifier.minify import minify


def minifier(
    fail_f: fx.GraphModule,
    inps: Sequence[Any],
    module_fails: Callable[[fx.GraphModule, Sequence[Any]], bool],
    dump_state: Callable[[fx.GraphModule, Sequence[Any]], Any] | None = None,
    *,
    save_dir: str | None = None,
) -> tuple[fx.GraphModule, list[Any]]:
    """The smallest graph and inputs that `module_fails` is true of: `ws.debug.minify`, called as functorch's.

    `dump_state` is given the result; without one, the path of its `repro.py` is printed. `save_dir` is minify's folder.
    """
    found = minify(fail_f, inps, module_fails, folder=save_dir)
    if dump_state is None:
        print(found)
    else:
        dump_state(found.gm, found.inputs)
    return found.gm, found.inputs
