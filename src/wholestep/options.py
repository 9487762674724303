"""Options of `ws.compile`, checked when they are given and frozen after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from wholestep.environment import default_lower
from wholestep.errors import OptionError
from wholestep.ir.dynamic_sizes import Dim as Dim
from wholestep.lower.options import LowerOptions
from wholestep.parallel.plan import Plan
from wholestep.passes.engine.contract import check_list
from wholestep.passes.engine.registry import resolve
from wholestep.remat.budget import Budget
from wholestep.remat.policy import policy_of


@dataclass(frozen=True)
class Options:
    """How a step is captured, rewritten and run."""

    lower: str = field(default_factory=default_lower)
    """`inductor`: compile runs of operators; `eager`: operator by operator, bit for bit like eager PyTorch; `debug`:
    like `eager`, and each value is checked against the graph's metadata (`ws.compilers.DebugInterpreter`)."""
    lower_options: Any = None
    """A `ws.lower.LowerOptions`, or a dict of its fields: min_aten_ops, strict, remat, exact, shed, config,
    region_config."""
    cuda_graph: bool | str = "auto"
    """Replay the step as one CUDA graph: True, False, or "auto" (on CUDA, where it can be done)."""
    memory_budget: Any = None
    """The peak memory of a step: bytes, "12GiB", or a fraction (0.0: the smallest possible, 1.0: nothing is computed
    again). Values are computed again in the backward to stay within. None: Inductor's own choice."""
    policy: Any = None
    """With `memory_budget`: what is kept or computed again in any case, by module path or operator:
    {"model.blocks.*": "recompute", torch.ops.aten.mm: "save"}, or a function of a node."""
    passes: Any = None
    """Rewrites of the graph: None, "default", or a list of passes (`ws.passes...`) and names, "default" among them."""
    disable_passes: Sequence[str] = ()
    """Names of passes that do not run."""
    dump_passes: str | None = None
    """A folder for the graphs before and after each pass."""
    parallel: Plan | None = None
    """`ws.Replicate(mesh)` or `ws.FullyShard(mesh)`: communication becomes nodes of the graph."""
    dynamic: Mapping[str, Mapping[int, Dim]] | None = None
    """Path of a batch leaf (or of a part of the batch) to the dimensions that may vary."""
    verify: int = 1
    """0: nothing; 1: structure, after capture and each pass; 2: metadata too; 3: also replay around each pass."""
    check_first: int = 0
    """Run the first calls in eager as well, from the same state, and raise WS-CHECK if they differ. Compiled regions
    then draw eager's random numbers, also on a GPU."""
    max_recompiles: int = 8
    hooks: str = "refuse"
    """`refuse` hooks, or `trace` what they compute."""
    name: str = field(default="")
    """What messages call this step; its function's name by default."""

    def __post_init__(self) -> None:
        if self.lower not in ("eager", "inductor", "debug"):
            raise OptionError(f"lower={self.lower!r}", fix='use "inductor", "eager" or "debug".')
        object.__setattr__(self, "lower_options", LowerOptions.of(self.lower_options, "lower_options"))
        if self.cuda_graph not in (True, False, "auto"):
            raise OptionError(f"cuda_graph={self.cuda_graph!r}", fix='use True, False or "auto".')
        object.__setattr__(self, "memory_budget", Budget.of(self.memory_budget))
        policy_of(self.policy)
        if self.policy is not None and self.memory_budget is None:
            raise OptionError("policy= without memory_budget=", fix="give a budget too; memory_budget=1.0 is widest.")
        if self.lower_options.shed and self.memory_budget is not None:
            raise OptionError(
                f"memory_budget= with lower_options' shed={self.lower_options.shed}",
                fix="leave out one: a budget chooses itself how many bytes to shed (step.last.memory.shed tells).",
            )
        object.__setattr__(self, "passes", resolve(self.passes, self.disable_passes))
        check_list(self.passes)
        if self.parallel is not None and not isinstance(self.parallel, Plan):
            raise OptionError(
                f"parallel={self.parallel!r} is no plan.", fix="use ws.Replicate(mesh) or ws.FullyShard(mesh)."
            )
        if self.verify not in (0, 1, 2, 3):
            raise OptionError(f"verify={self.verify!r}", fix="use 0, 1, 2 or 3.")
        if type(self.check_first) is not int or self.check_first < 0:
            raise OptionError(f"check_first={self.check_first!r}", fix="use a whole number, 0 or more.")
        if self.check_first and self.parallel is not None:
            raise OptionError(
                "check_first= with parallel=: the function in eager does not communicate, and is no reference.",
                fix="check the step without the plan; ws.debug.compare(train_step, step, args) compares on all ranks.",
            )
        if self.check_first:
            object.__setattr__(self, "lower_options", self.lower_options.with_eagers_random_numbers())
        if type(self.max_recompiles) is not int or self.max_recompiles < 0:
            raise OptionError(f"max_recompiles={self.max_recompiles!r}", fix="use a whole number, 0 or more.")
        if self.hooks not in ("refuse", "trace"):
            raise OptionError(f"hooks={self.hooks!r}", fix='use "refuse" or "trace".')
        _check_dynamic(self.dynamic)

    @classmethod
    def of(cls, **given: Any) -> Options:
        """Options from keyword arguments; an unknown name says which there are."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise OptionError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}.",
                fix=f"the options are {', '.join(sorted(known))}.",
            )
        return cls(**given)


def _check_dynamic(dynamic: Any) -> None:
    if dynamic is None:
        return
    good = isinstance(dynamic, Mapping) and all(
        isinstance(path, str)
        and isinstance(dims, Mapping)
        and all(isinstance(d, int) and isinstance(dim, Dim) for d, dim in dims.items())
        for path, dims in dynamic.items()
    )
    if not good:
        raise OptionError(
            f"dynamic={dynamic!r}", fix='use {"batch": {0: ws.Dim(min=1, max=64)}}: path, then dimension to range.'
        )
