"""A framework that is not installed is an error that says how to install it."""

from __future__ import annotations

from importlib.util import find_spec


def framework(extra: str, *also: str) -> None:
    """Raise ImportError unless a framework, and what it needs to train, is installed. `extra`: its name, and ours."""
    missing = [name for name in (extra, *also) if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"wholestep.integrations.{extra} needs {' and '.join(missing)}. "
            f"Install it with: pip install 'wholestep[{extra}]'"
        )
