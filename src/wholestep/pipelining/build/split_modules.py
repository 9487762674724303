"""`split_modules`: cut a model between submodules without capturing it, for chains of modules that export cannot trace.

    model(x) == head(block2(block1(embed(x))))       split_modules(model, [["embed", "block1"], ["block2", "head"]])

The chain is found by running the model once on the example: each submodule must be called once, with exactly the result
of the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.errors import PipelineError
from wholestep.pipelining.build.call_form import Call


class ModuleStage(torch.nn.Module):
    """Submodules that run one after the other, under their names in the model."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(inner for name in names for inner in _called(model, name))
        for name in self.names:
            attach_module(self, name, model.get_submodule(name))
        self.training = model.training

    def forward(self, *values: Any) -> Any:
        """Run the submodules."""
        for name in self.names:
            result = self.get_submodule(name)(*values)
            values = result if isinstance(result, tuple) else (result,)
        return values[0] if len(values) == 1 else values


def split_modules(
    module: torch.nn.Module,
    stages: int | Sequence[Sequence[str]],
    mb_args: Sequence[Any] = (),
    mb_kwargs: dict[str, Any] | None = None,
) -> list[ModuleStage]:
    """Cut a model between its submodules: names for each stage, or a number of stages with equal counts of submodules.

    With `mb_args` the model runs once, to verify that it is a chain of the submodules. The stages share the parameters
    of the model and run under torch's own `PipelineStage`.
    """
    chain = find_chain(module, (tuple(mb_args), dict(mb_kwargs or {}))) if mb_args or mb_kwargs else None
    if isinstance(stages, int):
        if chain is None:
            raise PipelineError(
                f"{type(module).__name__} is not a chain of submodules on this example, or no example was given.",
                fix="pass mb_args, or name the submodules of each stage",
            )
        if not 1 <= stages <= len(chain):
            raise PipelineError(f"{len(chain)} submodules cannot be cut into {stages} stages.", fix="ask for fewer")
        stages = [chain[i * len(chain) // stages : (i + 1) * len(chain) // stages] for i in range(stages)]
    named = [name for names in stages for name in names]
    if chain is not None and list(chain) != named and not _covers(chain, named):
        raise PipelineError(
            f"the model calls {', '.join(chain)}, in this order; the stages name {', '.join(named)}.",
            fix="name every submodule once, in the order of the calls",
        )
    return [ModuleStage(module, names) for names in stages]


def find_chain(module: torch.nn.Module, call: Call) -> tuple[str, ...] | None:
    """The submodules whose calls, one after the other, are the model; None if it is not such a chain.

    Runs the model once, without gradients, with its mode and random state restored. A model that cannot run here (meta
    tensors) has no chain.
    """
    names = _candidates(module)
    calls: list[tuple[str, list[Any], list[Any]]] = []

    def record(name: str) -> Any:
        def hook(submodule: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            calls.append((name, [*args, *kwargs.values()], _values(result)))

        return hook

    handles = [module.get_submodule(name).register_forward_hook(record(name), with_kwargs=True) for name in names]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            result = module(*call[0], **call[1])
    except Exception:
        return None
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    before = [*call[0], *call[1].values()]
    for _, given, returned in calls:
        if not _same(given, before):
            return None
        before = returned
    return tuple(name for name, _, _ in calls) if calls and _same(_values(result), before) else None


def _candidates(module: torch.nn.Module) -> list[str]:
    """The submodules that may be called: children, with ModuleList and Sequential replaced by theirs."""
    found: list[str] = []
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.Sequential):
            found += [f"{name}.{inner}" for inner in _candidates(child)]
        else:
            found.append(name)
    return found


def _called(module: torch.nn.Module, name: str) -> list[str]:
    """The submodules that are called for a name: for a ModuleList, which cannot be called, its members."""
    named = module.get_submodule(name)
    return [f"{name}.{inner}" for inner in _candidates(named)] if isinstance(named, torch.nn.ModuleList) else [name]


def _covers(chain: Sequence[str], named: Sequence[str]) -> bool:
    """True if each name is a submodule of the chain or a container of the next ones."""
    at = 0
    for name in named:
        start = at
        while at < len(chain) and (chain[at] == name or chain[at].startswith(name + ".")):
            at += 1
        if at == start:
            return False
    return at == len(chain)


def _values(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def attach_module(root: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Add a module under a dotted name, creating empty modules for missing prefixes."""
    *path, last = name.split(".")
    for atom in path:
        if not hasattr(root, atom):
            root.add_module(atom, torch.nn.Module())
        root = getattr(root, atom)
    root.add_module(last, module)
