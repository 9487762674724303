"""Which of a model's results is the loss.

loss=True                              the model returns the loss
loss=(False, True)                     it returns two values; the second is the loss
loss={"loss": True, "logits": False}   it returns a dictionary
loss="loss"                            the result of that name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from wholestep.errors import PipelineLossError

NAME = "loss"
"""The result that is the loss where nothing else is said."""


class LossWrapper(torch.nn.Module):
    """A model with its loss function. Subclasses say in `forward` how they are connected:

    >>> class MyModelWrapper(LossWrapper):
    >>>     def forward(self, x, targets):
    >>>         return self.loss_fn(self.module(x), targets)
    """

    def __init__(self, module: torch.nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """To be written by a subclass."""
        raise NotImplementedError(
            "This instance of LossWrapper does not have an overridden forward(). Please implement forward() to "
            "specify the arguments, connection between the module and loss, and loss output value."
        )


class TrivialLossWrapper(LossWrapper):
    """A model of one input; the loss of its result and the targets is returned."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss_fn(self.module(x), targets)


@dataclass(frozen=True)
class Result:
    """A value that the model computes, in the place where it is returned."""

    value: Any


def default_spec(module: torch.nn.Module, results: Any) -> Any:
    """Where the loss is if the caller did not say: a loss wrapper's only result, or a result named "loss"."""
    if isinstance(module, LossWrapper) and isinstance(results, Result):
        return True
    if NAME in named_parts(results) and isinstance(named_parts(results)[NAME], Result):
        return NAME
    return None


def find_loss(results: Any, spec: Any) -> Any:
    """The value of the one result that a spec marks. `results` has a `Result` for each value."""
    if isinstance(spec, str):
        spec = _spec_of_name(results, spec)
    found = _marked(results, spec, results, spec, "")
    if len(found) != 1:
        said = "marks nothing" if not found else f"marks {len(found)} values"
        raise _error(f"the loss spec {spec!r} {said}, and there is one loss", results)
    return found[0].value


def named_parts(results: Any) -> dict[str, Any]:
    """The results that have a name: keys of a dictionary, fields of a named tuple or dataclass."""
    if isinstance(results, Mapping):
        return {key: value for key, value in results.items() if isinstance(key, str)}
    if hasattr(results, "_fields"):
        return {name: getattr(results, name) for name in results._fields}
    if is_dataclass(results) and not isinstance(results, Result | type):
        return {field.name: getattr(results, field.name) for field in fields(results)}
    return {}


def _spec_of_name(results: Any, name: str) -> Any:
    parts = named_parts(results)
    if name not in parts:
        named = f"the names are {', '.join(map(repr, parts))}" if parts else "they have no names"
        raise _error(f"no result is named {name!r}: {named}", results)
    return {key: key == name for key in parts}


def _marked(part: Any, spec: Any, results: Any, whole: Any, at: str) -> list[Result]:
    """The results that a spec marks. `results` and `whole` are for the message."""
    where = f"result{at}"
    if spec is False or spec is None:
        return []
    if spec is True:
        if not isinstance(part, Result):
            kind = "several values" if isinstance(part, Mapping | tuple | list) or named_parts(part) else repr(part)
            raise _error(f"the loss spec {whole!r} marks {where}, which is {kind} and not a value of its own", results)
        return [part]
    if isinstance(spec, Mapping):
        parts = named_parts(part)
        if set(parts) != set(spec):
            raise _error(f"the keys of the loss spec {whole!r} are not those of {where}", results)
        return [each for key in spec for each in _marked(parts[key], spec[key], results, whole, f"{at}[{key!r}]")]
    if isinstance(spec, Sequence):
        if not isinstance(part, tuple | list):
            raise _error(f"the loss spec {whole!r} has a {type(spec).__name__} where {where} has none", results)
        if len(part) != len(spec):
            raise _error(f"the loss spec {whole!r} has {len(spec)} places and {where} has {len(part)}", results)
        pairs = enumerate(zip(part, spec, strict=True))
        return [each for i, (p, s) in pairs for each in _marked(p, s, results, whole, f"{at}[{i}]")]
    raise _error(f"{spec!r} is no loss spec", results)


def bad_loss(name: str, why: str, results: Any) -> PipelineLossError:
    """The error for a value that no backward can begin with."""
    return PipelineLossError(
        f"{name} is marked as the loss, and {why}", fix=f"mark a single number with a gradient: {_shown(results)}"
    )


def _error(what: str, results: Any) -> PipelineLossError:
    return PipelineLossError(
        f"{what}.", fix=f"write a spec like the results, with True at the loss, here for example {_shown(results)}"
    )


def _shown(results: Any) -> str:
    """A spec that fits these results, with True at the one named "loss" or at the first."""
    wanted = named_parts(results).get(NAME)
    return repr(_example(results, wanted if isinstance(wanted, Result) else _first(results)))


def _example(part: Any, wanted: Result | None) -> Any:
    parts = named_parts(part)
    if parts:
        return {key: _example(value, wanted) for key, value in parts.items()}
    if isinstance(part, tuple | list):
        return type(part)(_example(value, wanted) for value in part)
    return part is wanted


def _first(part: Any) -> Result | None:
    """The first value that the model computes."""
    if isinstance(part, Result):
        return part
    parts = list(named_parts(part).values()) or (part if isinstance(part, tuple | list) else ())
    return next((found for found in map(_first, parts) if found is not None), None)
