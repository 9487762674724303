"""The calling convention of a model: any mix of positional and keyword arguments becomes one flat list.

Export fixes one form of the call. A pipe accepts any form that the model accepts: `pipe(x, mask)`,
`pipe(mask=mask, x=x)` and a dictionary with its keys in another order give the same leaves, in signature order.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.errors import PipelineCallError, PipelineInputError
from wholestep.torch_private.fx_graphs import pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class CallForm:
    """The form of the captured call."""

    signature: inspect.Signature
    names: tuple[str, ...]
    """The names of the given arguments."""
    variable: Mapping[str, tuple[str, ...]]
    """For a `**kwargs` argument, the names in it."""
    spec: Any
    """The pytree spec of `(args, kwargs)`, in signature order."""
    constants: Mapping[int, Any]
    """Non-tensor leaves by index. They are constants of the graph."""
    paths: tuple[str, ...]
    """The name of each leaf in error messages."""

    def __deepcopy__(self, memo: object) -> CallForm:
        return self  # immutable

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in signature order. Raises if the call does not match the captured one."""
        canonical = _in_order(self.signature, self._arguments(args, kwargs))
        try:
            leaves: list[Any] = self.spec.flatten_up_to(canonical)
        except ValueError as error:
            raise PipelineInputError(
                f"the structure of the arguments differs from that of the captured call: {error}",
                fix="call the pipe with the structure that pipeline() was given, or capture this structure too",
            ) from error
        tensors: list[torch.Tensor] = []
        for place, leaf in enumerate(leaves):
            if place in self.constants:
                _check_constant(self.paths[place], leaf, self.constants[place])
            elif not isinstance(leaf, torch.Tensor):
                raise PipelineInputError(
                    f"{self.paths[place]} was a tensor in the captured call and is {leaf!r} now",
                    fix="pass a tensor, or capture the model again with this value",
                )
            else:
                tensors.append(leaf)
        return tensors

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise PipelineCallError(
                f"the arguments do not match the signature of the model: {error}.",
                fix=f"pass {', '.join(self.names) or 'no argument'}, as to pipeline(); with a schedule, on the rank of "
                "the first stage",
            ) from error
        found: dict[str, Any] = {}
        for name in self.names:
            if name in given:
                found[name] = given.pop(name)
            else:
                found[name] = self.signature.parameters[name].default
        for name, value in given.items():
            default = self.signature.parameters[name].default
            if value is not default and not _equal(value, default):
                raise PipelineInputError(
                    f"the argument {name} was not given when the model was captured",
                    fix=f"pass {name} in mb_args or mb_kwargs of pipeline()",
                )
        for name, order in self.variable.items():
            if set(found[name]) != set(order):
                raise PipelineInputError(
                    f"the captured call had the keyword arguments {', '.join(order)}, this one has "
                    f"{', '.join(found[name])}",
                    fix="pass the same keyword arguments",
                )
            found[name] = {key: found[name][key] for key in order}
        return found


@dataclass(frozen=True)
class ResultForm:
    """The structure of a model's results, and the leaves that are constants of the graph."""

    spec: Any
    leaves: tuple[tuple[Any] | None, ...]
    """None for a value of the last stage; else the constant."""

    def __deepcopy__(self, memo: object) -> ResultForm:
        return self  # immutable

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """The result with these values."""
        values = iter(flat)
        leaves = [next(values) if leaf is None else leaf[0] for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def call_form(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallForm:
    """The form of an example call."""
    signature = inspect.signature(module.forward)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    canonical = _in_order(signature, arguments)
    leaves, spec = pytree.tree_flatten_with_path(canonical)
    constants = {place: leaf for place, (_, leaf) in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    variable = {
        name: tuple(arguments[name])
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.VAR_KEYWORD and name in arguments
    }
    names = list(_leaf_names(signature, canonical))
    paths = tuple(_path(names, path) for path, _ in leaves)
    return CallForm(signature, tuple(arguments), variable, spec, constants, paths)


def export_call(form: CallForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The example call with as many positional arguments as possible: the leaves are in signature order."""
    return _in_order(form.signature, dict(form.signature.bind(*args, **kwargs).arguments))


def _in_order(signature: inspect.Signature, arguments: dict[str, Any]) -> Call:
    ordered = {name: arguments[name] for name in signature.parameters if name in arguments}
    bound = inspect.BoundArguments(signature, ordered)
    return bound.args, bound.kwargs


def _leaf_names(signature: inspect.Signature, canonical: Call) -> list[str]:
    """The names of the positional arguments."""
    names: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(canonical[0]) - len(names))]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
    return names[: len(canonical[0])]


def _path(positional: list[str], path: Sequence[Any]) -> str:
    """`(0, 1, 'mask')` in `(args, kwargs)` as `batch['mask']`."""
    in_kwargs, place = path[0].idx == 1, path[1]
    head = str(place.key) if in_kwargs else positional[place.idx]
    return head + "".join(str(step) for step in path[2:])


def _check_constant(path: str, given: Any, captured: Any) -> None:
    if given is captured or _equal(given, captured):
        return
    raise PipelineInputError(
        f"{path} was {captured!r} in the captured call and is {_short(given)} now; it is a constant of the graph",
        fix="call the pipe with the captured value, or capture the model again with this one",
    )


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b)


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
