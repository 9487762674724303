"""wholestep where people train: each module here is for one framework, and imports it.

transformers    WholestepTrainer, WholestepTrainerMixin
lightning       WholestepCallback
accelerate      nothing is needed: `ws.compile` takes a step that is written for Accelerate or Fabric

What they share is here: the error for a framework that is not installed, and errors that name the user's line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from wholestep.errors import WholestepError
from wholestep.ir.meta import location_of_exception, location_of_function

_HERE = os.path.dirname(__file__) + os.sep


def framework(extra: str, *also: str) -> None:
    """Raise ImportError unless a framework, and what it needs to train, is installed. `extra`: its name, and ours."""
    missing = [name for name in (extra, *also) if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"wholestep.integrations.{extra} needs {' and '.join(missing)}. "
            f"Install it with: pip install 'wholestep[{extra}]'"
        )


@contextmanager
def lines_of_users(packages: tuple[str, ...], written: Callable[[], Any]) -> Iterator[None]:
    """Errors of a step that name a line of ours or of a framework name the line of the user's that led there.

    `written`: the function of the user's that the framework calls, for errors that are found after it ran.
    """
    try:
        yield
    except WholestepError as error:
        folders = (_HERE, *map(_folder, packages))
        named = error.location and (error.location.inside or error.location)
        if named is not None and not named.file.startswith(folders):
            raise
        raised = error.__context__ or error  # a capture raises again, with the line
        place = location_of_exception(raised, besides=folders) or location_of_function(written())
        raise type(error)(
            error.what, fix=error.fix, node=error.node, location=place, around=error.around
        ) from error.__cause__


def _folder(package: str) -> str:
    return os.path.dirname(str(sys.modules[package].__file__)) + os.sep
