"""`debug_nop` and `DebugInterpreter`: run a graph node by node and compare each real value with the graph's metadata.

    DebugInterpreter(gm).run(*inputs)                      raises at the first node that contradicts its metadata
    DebugInterpreter(gm, stop=False).run(*inputs)          runs to the end, then raises with all of them

Compared are dtype, device, size, stride, offset, contiguity, scalars with their symbols (`metadata_check`), and
aliasing: a result is a view of an argument only if metadata or the operator's schema says so, and always if both do.
No ShapeEnv is needed, so any graph with `val` in its metadata can be run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.compilers.boxed import Compiled, boxed, graph_module
from wholestep.compilers.metadata_check import MetadataDifference, SymbolValues, differences, is_known, unknown_places
from wholestep.errors import DebugError, Location
from wholestep.ir.effects import draws, written_positions
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.meta import KEY, location_of_node, module_path, node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.fake_tensors import storage_key
from wholestep.torch_private.operators import OpOverload, may_copy, schema_of, shares_storage
from wholestep.torch_private.pytrees import pytree

_WRONG_METADATA = (
    "the operator's fake kernel, or the pass that last changed this node, is wrong; or the graph ran on inputs that it "
    "was not traced for."
)
_NOT_FINITE = "look at the inputs of this node; eager computes the same from them."


@dataclass(frozen=True)
class Mismatch:
    """A node whose value contradicts its metadata."""

    node: str
    statement: str
    difference: MetadataDifference
    module: str = ""
    location: Location | None = None

    def __str__(self) -> str:
        where = f" ({', '.join(str(part) for part in (self.module, self.location) if part)})"
        return f"{self.node}: {self.difference}{where if where != ' ()' else ''}"


class DebugInterpreter(fx.Interpreter):
    """An interpreter that checks every node.

    `graph`: run this one with the module's attributes.

    `stop`: raise at the first mismatch; otherwise at the end of the run, with all of them. `raise_error=False` never
    raises: they are in `mismatches` after the run. `check_nan` and `check_inf` also report nodes that produce NaN or
    inf from arguments without any.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        garbage_collect_values: bool = True,
        graph: fx.Graph | None = None,
        *,
        stop: bool = True,
        raise_error: bool = True,
        check_nan: bool = False,
        check_inf: bool = False,
        check_aliasing: bool = True,
    ) -> None:
        super().__init__(module, garbage_collect_values, graph)
        self._stop = stop and raise_error
        self._raise = raise_error
        self._tests = [test for on, test in ((check_nan, torch.isnan), (check_inf, torch.isinf)) if on]
        self._aliasing = check_aliasing
        self.mismatches: list[Mismatch] = []
        self.symbols = SymbolValues()
        self._shifts: dict[int, list[tuple[int, Tensor]]] = {}
        """By how much storage offsets of inputs differ from those traced, which no guard forbids: by storage, with the
        tensors, so that the storage is not reused during the run."""
        self._is_step = any(KEY in node.meta for node in self.graph.nodes)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run on these inputs."""
        self.mismatches, self.symbols, self._shifts = [], SymbolValues(), {}
        try:
            result = super().run(*args, **kwargs)
        except DebugError:
            # A new error: the interpreter appends its own note on the node to every error that passes.
            raise _error(self.mismatches, self.symbols) from None
        finally:
            self._shifts = {}
        if self.mismatches and self._raise:
            raise _error(self.mismatches, self.symbols)
        return result

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and check its value."""
        had = None
        if self._tests and n.op not in ("placeholder", "get_attr"):
            given = [*(self.env[arg] for arg in n.all_input_nodes), *_numbers_in((n.args, n.kwargs))]
            had = [self._has(test, given) for test in self._tests]
        result = super().run_node(n)
        for difference in self._differences(n, result, had):
            if not is_known(n, difference):
                self._report(n, difference)
        if self._is_step:
            self._use_in_place_result(n, result)
        return result

    def _use_in_place_result(self, node: fx.Node, result: Any) -> None:
        """Where eager ran an operator in place, use its result: some round differently from their functional form.

        It is called on copies; the graph stays functional."""
        op = node_meta(node).in_place
        if op is None or not isinstance(node.target, OpOverload) or draws(node):
            return
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        values = call_on_copies(op, written_positions(op), *args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if [_form(value) for value in values] == [_form(leaf) for leaf in leaves]:
            for leaf, value in zip(leaves, values, strict=True):
                leaf.copy_(value)

    def _differences(self, node: fx.Node, result: Any, had: list[bool] | None) -> Iterator[MetadataDifference]:
        if node.op == "output":
            return
        wanted = node.meta.get("val")
        if wanted is not None:
            if node.op == "placeholder":
                self._note_shift(wanted, result)
            yield from differences(
                wanted,
                result,
                self.symbols,
                shifts=self._shifts_of(node, wanted, result),
                plain_numbers=not self._is_step,
                skip=unknown_places(node),
            )
            if self._aliasing and node.op == "call_function":
                yield from self._alias_differences(node, wanted, result)
        for test, before in zip(self._tests, had or [], strict=False):
            if not before and self._has(test, [result]):
                name = test.__name__.removeprefix("is")
                yield MetadataDifference("a result", "", f"{name}, and no argument is")

    def _note_shift(self, wanted: Any, given: Any) -> None:
        if isinstance(wanted, Tensor) and isinstance(given, Tensor) and _is_strided(wanted) and _is_strided(given):
            traced = wanted.storage_offset()
            if isinstance(traced, int) and traced != given.storage_offset():
                shift = int(given.storage_offset()) - traced
                self._shifts.setdefault(storage_key(given), []).append((shift, given))

    def _shifts_of(self, node: fx.Node, wanted: Any, result: Any) -> list[int] | None:
        if node.target is torch.ops.aten.copy.default:
            return None  # the kernel may preserve the storage offset, in new memory; the fake kernel does not
        if isinstance(node.target, OpOverload) and not _is_fresh(node.target):
            args = [arg.meta.get("val") for arg in node.all_input_nodes]
            if schema_of(node.target).is_mutable or not any(shares_storage(fake, wanted) for fake in args):
                return None  # metadata does not say which storage it is in
        if not self._shifts or not isinstance(result, Tensor) or not _is_strided(result):
            return [0]
        return [shift for shift, _ in self._shifts.get(storage_key(result), [])] + [0]

    def _alias_differences(self, node: fx.Node, wanted: Any, result: Any) -> Iterator[MetadataDifference]:
        says_fresh = isinstance(node.target, OpOverload) and _is_fresh(node.target)
        args = [(arg.name, arg.meta.get("val"), self.env.get(arg)) for arg in node.all_input_nodes]
        args = [(name, fake, value) for name, fake, value in args if _are_strided(fake, value)]
        several = not isinstance(result, Tensor)
        for place, (said, made) in enumerate(zip(pytree.tree_leaves(wanted), pytree.tree_leaves(result), strict=False)):
            for name, fake, value in args if _are_strided(said, made) else ():
                expected, found = shares_storage(fake, said), shares_storage(value, made)
                which = str(place) if several else ""
                if expected and not found and not says_fresh and made.numel() > 0:
                    yield MetadataDifference("memory", f"that of {name}", "its own", which)
                elif found and not expected and says_fresh:
                    yield MetadataDifference("memory", "its own", f"that of {name}", which)

    def _has(self, test: Any, values: Any) -> bool:
        tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor)]
        leaves = [v for v in tensors if v.is_floating_point() or v.is_complex()]
        return any(bool(test(leaf).any()) for leaf in leaves)

    def _report(self, node: fx.Node, difference: MetadataDifference) -> None:
        found = Mismatch(node.name, format_node(node), difference, module_path(node), location_of_node(node))
        self.mismatches.append(found)
        if self._stop:
            raise _error([found], self.symbols)


def _form(value: Any) -> Any:
    return (value.dtype, value.device, value.shape) if isinstance(value, Tensor) else None


def _is_fresh(op: OpOverload) -> bool:
    """True if an operator's schema says that its results have memory of their own.

    Composite operators do not obey it: dropout returns its argument outside of training.
    """
    return not may_copy(op) and not any(each.alias_info is not None for each in schema_of(op).returns)


def _numbers_in(args: Any) -> list[Tensor]:
    """Float constants in the graph: a mask that is filled with -inf is intended."""
    return [torch.tensor(leaf) for leaf in pytree.tree_leaves(args) if isinstance(leaf, float)]


def _are_strided(*values: Any) -> bool:
    return all(isinstance(value, Tensor) and _is_strided(value) for value in values)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _error(mismatches: list[Mismatch], symbols: SymbolValues) -> DebugError:
    first = mismatches[0]
    bound = f" (with {symbols.shown()})" if symbols.values else ""
    more = f"; {len(mismatches)} mismatches in all" if len(mismatches) > 1 else ""
    by_metadata = bool(first.difference.expected)
    error = DebugError(
        f"the value of {first.node} {'contradicts the metadata' if by_metadata else 'is not finite'}: "
        f"{first.difference}{bound}{more}.",
        node=first.statement,
        location=first.location,
        around=[str(each) for each in mismatches[1:20]],
        fix=_WRONG_METADATA if by_metadata else _NOT_FINITE,
    )
    error.mismatches = tuple(mismatches)
    return error


def debug_nop(fx_g: fx.GraphModule | StepGraph, _: Sequence[Any] = (), **options: bool) -> Compiled:
    """Run the graph node by node and check each value against the graph's metadata.

    `options` are those of `DebugInterpreter`: stop, raise_error, check_nan, check_inf, check_aliasing.
    """
    return boxed(checked_program(graph_module(fx_g), **options))


def checked_program(gm: fx.GraphModule, **options: bool) -> Callable[..., Any]:
    """The function that runs a graph under a `DebugInterpreter`, a new one for each call."""

    def run(*args: Any) -> Any:
        return DebugInterpreter(gm, True, None, **options).run(*args)

    return run
