"""`debug_nop` and `DebugInterpreter`: run a graph node by node and compare each real value with the graph's metadata.

    DebugInterpreter(gm).run(*inputs)                      raises at the first node that contradicts its metadata
    DebugInterpreter(gm, stop=False).run(*inputs)          runs to the end, then raises with all of them

Compared are dtype, device, size, stride, offset, contiguity, scalars with their symbols (`metadata_check`), and
aliasing: a result is a view of an argument only if metadata or the operator's schema says so, and always if both do.
No ShapeEnv is needed, so any graph with `val` in its metadata can be run.

Compare one real value with the metadata of its node: dtype, device, size, stride, offset, contiguity, scalars.

    MetadataDifference("stride", "(4, 1)", "(1, 4)")

Strides count where a dimension has more than one element. Sizes and scalars may be symbolic (`SymbolValues`): a symbol
alone (`s0` as a size of an input, `u0` as the result of `.item()`) is bound to the value of this run where it is first
seen, and checked from then on; an expression over bound symbols has a value to compare with. No ShapeEnv is needed;
where there is one, the range of a symbol is checked too. Known faults of torch's own fake kernels are not reported
(`is_known`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from wholestep.compilers.run_unchanged import Compiled, boxed, graph_module
from wholestep.errors import DebugError, Location
from wholestep.ir.effects import declares_writes, draws, fresh_results, written_positions
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.meta import KEY, location_of_node, module_path, node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.fake_tensors import storage_key
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.operators import OpOverload, may_copy, schema_of, shares_storage
from wholestep.torch_private.symbolic_shapes import symbol_range

aten = torch.ops.aten

_NUMBERS = (int, float, bool)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class MetadataDifference:
    """What metadata says and what a run found. `which`: the place of the value where a node has several.

    `expected` is empty where the value itself is wrong, whatever its metadata.
    """

    what: str
    expected: str
    found: str
    which: str = ""

    def __str__(self) -> str:
        place = f"output {self.which}: " if self.which else ""
        return f"{place}{self.what} is {self.found}{f', metadata says {self.expected}' if self.expected else ''}"


def differences(
    wanted: Any,
    found: Any,
    symbols: SymbolValues,
    *,
    shifts: Sequence[int] | None = (0,),
    plain_numbers: bool = True,
    skip: Collection[int] = (),
) -> Iterator[MetadataDifference]:
    """All differences between the metadata and the value of a node.

    `shifts`: by how much the storage offset may exceed that of the metadata; None where it is not compared.
    `plain_numbers`: True if scalars that are not symbolic are constants; a StepGraph has those of its first run.
    `skip`: indices of values that are not compared.
    """
    wanted_leaves, found_leaves = pytree.tree_leaves(wanted), pytree.tree_leaves(found)
    if len(wanted_leaves) != len(found_leaves):
        yield MetadataDifference("number of values", str(len(wanted_leaves)), str(len(found_leaves)))
        return
    for i, (one, other) in enumerate(zip(wanted_leaves, found_leaves, strict=True)):
        if i in skip or (isinstance(one, _NUMBERS) and not plain_numbers):
            continue
        which = str(i) if len(wanted_leaves) > 1 else ""
        for difference in _of_leaf(one, other, symbols, shifts):
            yield MetadataDifference(difference.what, difference.expected, difference.found, which)


def _of_leaf(
    wanted: Any, found: Any, symbols: SymbolValues, shifts: Sequence[int] | None
) -> Iterator[MetadataDifference]:
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        yield from _of_tensor(wanted, found, symbols, shifts)
    elif isinstance(wanted, Tensor) and found is None and wanted.shape == (0,):
        return  # the token that orders effects: an empty tensor when traced, None when run
    elif isinstance(wanted, Tensor) or isinstance(found, Tensor):
        yield MetadataDifference("kind", type(wanted).__name__, type(found).__name__)
    elif isinstance(wanted, (*_NUMBERS, *_SYMBOLIC)) and isinstance(found, _NUMBERS):
        yield from _of_number("value", wanted, found, symbols)


def _of_number(what: str, wanted: Any, found: Any, symbols: SymbolValues) -> Iterator[MetadataDifference]:
    expected = symbols.expected(wanted, found)
    if expected is not None and expected != found and not (expected != expected and found != found):
        yield MetadataDifference(what, _shown(wanted, expected), str(found))
    elif reason := symbols.out_of_range(wanted, found):
        yield MetadataDifference(f"range of {what}", reason, str(found))


def _of_tensor(
    wanted: Tensor, found: Tensor, symbols: SymbolValues, shifts: Sequence[int] | None
) -> Iterator[MetadataDifference]:
    for what in ("dtype", "device", "layout"):
        one, other = getattr(wanted, what), getattr(found, what)
        if one != other and not (what == "device" and _same_device(one, other)):
            yield MetadataDifference(what, str(one), str(other))
    if wanted.dim() != found.dim():
        yield MetadataDifference("number of dimensions", str(wanted.dim()), str(found.dim()))
        return
    size = [symbols.expected(one, other) for one, other in zip(wanted.shape, found.shape, strict=True)]
    if any(one is not None and one != other for one, other in zip(size, found.shape, strict=True)):
        yield MetadataDifference("size", _shown(tuple(wanted.shape), tuple(size)), str(tuple(found.shape)))
        return
    for one, other in zip(wanted.shape, found.shape, strict=True):
        if reason := symbols.out_of_range(one, other):
            yield MetadataDifference("range of size", reason, str(other))
    if wanted.layout is not torch.strided or found.layout is not torch.strided:
        return
    if found.numel() > 0:
        yield from _of_memory(wanted, found, symbols, shifts)


def _of_memory(
    wanted: Tensor, found: Tensor, symbols: SymbolValues, shifts: Sequence[int] | None
) -> Iterator[MetadataDifference]:
    stride = [symbols.expected(one, other) for one, other in zip(wanted.stride(), found.stride(), strict=True)]
    pairs = zip(found.shape, stride, found.stride(), strict=True)
    if any(size > 1 and one is not None and one != other for size, one, other in pairs):
        yield MetadataDifference("stride", _shown(wanted.stride(), tuple(stride)), str(found.stride()))
        filled = [other if one is None else one for one, other in zip(stride, found.stride(), strict=True)]
        if is_contiguous(found.shape, filled) != found.is_contiguous():
            yield MetadataDifference(
                "contiguity", *("contiguous", "not contiguous")[:: -1 if found.is_contiguous() else 1]
            )
    if shifts is None:
        return
    starts = [int(found.storage_offset()) - shift for shift in shifts]
    offset = symbols.expected(wanted.storage_offset(), starts[0])
    if offset is not None and offset not in starts:
        yield MetadataDifference("offset", _shown(wanted.storage_offset(), offset), str(starts[0]))


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True if memory of these sizes and strides is one block in order; dimensions of one element do not count."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True


def _same_device(one: torch.device, other: torch.device) -> bool:
    """True for `cuda` and `cuda:0`: only one of them has an index."""
    numbers: set[int | None] = {one.index, other.index}
    return one.type == other.type and None in numbers


def _shown(wanted: Any, value: Any) -> str:
    text = str(wanted)
    return text if text == str(value) or value is None else f"{text} = {value}"


class SymbolValues:
    """Values by symbol, for one run of a graph."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}

    def expected(self, wanted: Any, found: int | float | bool) -> Any:
        """The value of `wanted` (a plain or symbolic scalar) in this run; None where it is not known yet.

        `found` is the value of the run: an unbound symbol is bound to it.
        """
        node = getattr(wanted, "node", None)
        if node is None:
            return wanted
        expr = getattr(node, "expr", None)
        if expr is None:  # a symbolic scalar of our own capture: an input, not an expression
            return None
        if expr.is_Symbol and expr not in self.values:
            self.values[expr] = found
            return found
        return self._evaluated(expr)

    def _evaluated(self, expr: Any) -> Any:
        known = self._known.get(expr)
        if known is None:
            if not expr.free_symbols <= self.values.keys():
                return None
            value = expr.xreplace({symbol: sympy.sympify(self.values[symbol]) for symbol in expr.free_symbols})
            known = self._known[expr] = _number(value)
        return known

    def out_of_range(self, wanted: Any, found: int | float | bool) -> str:
        """Why a value cannot be that of a symbol: its range in the ShapeEnv; "" if it can."""
        node = getattr(wanted, "node", None)
        expr, env = getattr(node, "expr", None), getattr(node, "shape_env", None)
        if env is None or not getattr(expr, "is_Symbol", False) or isinstance(found, bool | float):
            return ""
        lower, upper = symbol_range(env, expr)
        if (lower is not None and found < lower) or (upper is not None and found > upper):
            return f"{expr} in [{'-inf' if lower is None else lower}, {'inf' if upper is None else upper}]"
        return ""

    def shown(self) -> str:
        """The bindings for a message: `s0=4, u1=7`."""
        return ", ".join(f"{symbol}={value}" for symbol, value in self.values.items())


def _number(value: Any) -> Any:
    value = sympy.simplify(value) if not value.is_number and not value.is_Boolean else value
    if value in (sympy.true, sympy.false):
        return bool(value)
    if value.is_Integer or value.is_integer:
        return int(value)
    return float(value)


_WORKSPACES: dict[Any, tuple[int, ...]] = {
    aten.mkldnn_rnn_layer.default: (3,),
    aten._scaled_dot_product_efficient_attention.default: (2, 3),
    aten._scaled_dot_product_flash_attention.default: (6, 7),
    aten._scaled_dot_product_cudnn_attention.default: (6, 7),
}
"""Results that only the operator's own backward reads, and whose size the fake kernels do not know; for attention on a
GPU the seed and the offset of its dropout, which are on the CPU except under CUDA graph capture."""

_NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
)
_STATISTICS = {1: "mean", 2: "deviation"}
"""For half-precision inputs with float32 weights (autocast), CPU kernels return these in float32."""

_UNSAFE = (
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    aten._unsafe_view.default,
)
"""Views whose schema says they are not, so that autograd permits writes (cells of recurrent networks use them)."""


_BACKWARDS = (
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)


def unknown_places(node: fx.Node) -> tuple[int, ...]:
    """Indices of results of a node whose metadata is unknown."""
    source, index = _part_of(node)
    if source is not None:
        return (0,) if index in _WORKSPACES.get(source.target, ()) else ()
    return _WORKSPACES.get(node.target, ())


def is_known(node: fx.Node, difference: MetadataDifference) -> bool:
    """True if a difference is a known fault of torch's fake kernels."""
    if node.op == "placeholder" and difference.what == "device":
        # A seed that the forward saved for the backward.
        return bool(node.users) and all(user.target in _BACKWARDS for user in node.users) and _is_small_integer(node)
    if difference.what in ("memory", "offset"):
        source, _ = _part_of(node)
        return (node if source is None else source).target in _UNSAFE
    if difference.what != "dtype" or difference.found != "torch.float32":
        return False
    source, index = _part_of(node)
    if source is not None:
        return source.target in _NORMS and index in _STATISTICS
    return node.target in _NORMS and difference.which in map(str, _STATISTICS)


def _is_small_integer(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dim() <= 1 and not val.dtype.is_floating_point


def _part_of(node: fx.Node) -> tuple[fx.Node | None, Any]:
    """The producer of a `getitem` node, and the index."""
    source, index = (*node.args, None, None)[:2]
    return (source, index) if node.target is operator.getitem and isinstance(source, fx.Node) else (None, None)


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
            if declares_writes(node.target) or not any(shares_storage(fake, wanted) for fake in args):
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
    return not may_copy(op) and fresh_results(op) == len(schema_of(op).returns)


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
