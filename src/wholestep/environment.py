"""The environment variables that wholestep reads, all of them. Each only sets the default of an option.

WHOLESTEP_LOWER    inductor (the default) or eager: `lower=` of `ws.compile`
"""

from __future__ import annotations

import os

LOWER = "WHOLESTEP_LOWER"


def default_lower() -> str:
    """How steps run where `lower=` does not say."""
    return os.environ.get(LOWER, "") or "inductor"
