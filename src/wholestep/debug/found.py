"""What a search along the way of a step found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Found:
    """Where a step goes wrong. False if nothing was found."""

    stage: str
    """nothing, eager, capture, pass, lowering or guard: the first part of the way that is wrong."""
    what: str = ""
    node: str = ""
    """The node that is wrong."""
    text: str = ""
    """That node as Python, with the user's line."""
    was: str = ""
    """What it was before the pass that is wrong, if that is another text."""
    guard_key: int | None = None
    """Which of `step.graphs` the call would run; None: it would be captured anew."""
    pass_name: str = ""
    region: str = ""
    repro_path: Path | None = None
    right: tuple[str, ...] = field(default=())
    """What was looked at and is right."""

    def __bool__(self) -> bool:
        return self.stage != "nothing"

    def __str__(self) -> str:
        key = "a new graph" if self.guard_key is None else f"graph {self.guard_key} of the step"
        lines = [f"the call runs {key}"]
        lines += [f"  right   {each}" for each in self.right]
        if not self:
            return "\n".join([*lines, "nothing is wrong"])
        part = {"pass": f"pass {self.pass_name}", "lowering": f"lowering, {self.region or 'no region'}"}
        lines.append(f"  wrong   {part.get(self.stage, self.stage)}: {self.what}")
        lines += [f"  node    {self.text or self.node}"] if self.node else []
        lines += [f"  before  {self.was}"] if self.was else []
        lines += [f"  repro   {self.repro_path}"] if self.repro_path is not None else []
        return "\n".join(lines)
