"""What a call does, known from its target: operators from their schema and tags, corrected where the schema is silent;
Python functions and methods (in graphs of symbolic tracing and dynamo) by name.

    add_.Tensor(a!, b)             writes argument 0              functional variant: add.Tensor
    _foreach_mul_.Scalar(a![], s)  writes argument 0, a list      functional variant: _foreach_mul.Scalar
    select.int(a, d, i)            result is a view of argument 0
    native_batch_norm(..)          writes 3 and 4 if `training`   not in its schema
    _unsafe_view(a, size)          result is a view of argument 0, not in its schema
    all_reduce(a, op, group)       communicates; its result is not there before its wait

    x.add_(1), x.__iadd__(1), iadd(x, 1)     write x: the name says so
    relu6(x, True), add(a, b, out=c)         write x, c: an argument says so
    batch_norm(x, m, v, w, b, True)          writes m and v: neither says so
    x.reshape(-1), einsum("i->i", x)         may return x, or a view of it
    rand(3), dropout(x, 0.5, True)           draw random numbers; dropout(x, 0.5, False) returns x

A function that is not torch's or Python's own may return a view of every argument; it is assumed to write none.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from wholestep.ir.call_arguments import argument, nodes_in
from wholestep.ir.graph_functions import SIDE_EFFECTS, call_on_copies
from wholestep.torch_private.operators import (
    OpOverload,
    argument_names,
    find_overloads,
    op_name,
    overload_name,
    plain_name,
    schema_of,
)

COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "c10d_functional"})

_TORCH_NAMESPACES = COLLECTIVE_NAMESPACES | frozenset(
    "aten prims prim rngprims debugprims quantized quantized_decomposed inductor profiler c10d c10d_prims symm_mem "
    "_c10d_functional_autograd _dtensor bucketing mkl mkldnn onednn mkldnn_prims sparse static_runtime "
    "wholestep_packed".split()
)
"""Operators of torch itself and our own, which do nothing but what their schema says."""

_UPDATES_STATISTICS = {
    "batch_norm": "training",
    "native_batch_norm": "training",
    "cudnn_batch_norm": "training",
    "miopen_batch_norm": "training",
    "_batch_norm_impl_index": "training",
    "instance_norm": "use_input_stats",
    "batch_norm_update_stats": "",
    "batch_norm_gather_stats": "",
    "batch_norm_gather_stats_with_counts": "",
}
"""Operators that write `running_mean` and `running_var` without saying so in their schema, and the argument that must
be true for it ("" if they always write)."""

_HIDDEN_VIEWS = frozenset({"_unsafe_view"})
"""Share memory with their first argument although the schema promises a new tensor."""

_UNSAFE_SPLITS = frozenset({"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"})

_OTHER_STORAGE = frozenset(
    {"resize_", "resize_as_", "set_", "set", "resize", "_resize_output_", "unsafe_set_", "requires_grad_"}
)
"""Change what a tensor is, rather than what it holds."""

_LAYOUT_ONLY = frozenset(
    "view _unsafe_view view_as t transpose swapaxes swapdims permute movedim moveaxis expand expand_as squeeze "
    "unsqueeze select slice narrow diagonal unbind split split_with_sizes chunk tensor_split as_strided detach alias "
    "unfold view_as_real view_as_complex size dim numel stride sym_size sym_numel sym_stride is_contiguous".split()
)
"""Operators, functions and methods whose result is always a view or a size: unlike `reshape`, which may copy."""

_COPIES = frozenset({"_to_copy", "clone", "constant_pad_nd", "contiguous", "detach_copy"})
_MEASURES = frozenset({"sym_size", "sym_numel", "sym_stride", "sym_storage_offset"})
_POINT_TO_POINT = frozenset({"isend", "irecv", "batch_p2p_ops"})

_FUNCTIONAL_BY_HAND: dict[str, str] = {
    "native_batch_norm": "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit": "_native_batch_norm_legit_functional",
    "_batch_norm_with_update": "_batch_norm_with_update_functional",
}


def is_custom_operator(target: Any) -> bool:
    """Whether a target is an operator of `torch.library`: its kernel may have effects that its schema does not tell, so
    it runs as often as in eager and in the same order."""
    return isinstance(target, OpOverload) and _namespace(target) not in _TORCH_NAMESPACES


@lru_cache(maxsize=4096)
def _namespace(op: OpOverload) -> str:
    return op_name(op).partition("::")[0]


@lru_cache(maxsize=4096)
def _base_name(op: OpOverload) -> str:
    """`add_` of `aten::add_.Tensor`, in every namespace."""
    return op_name(op).partition("::")[2].partition(".")[0]


def may_write(target: Any) -> bool:
    """Whether a node with this operator can change the contents of an argument."""
    return isinstance(target, OpOverload) and bool(written_positions(target))


@lru_cache(maxsize=4096)
def written_positions(op: OpOverload) -> tuple[int, ...]:
    """Schema positions of the arguments whose contents an operator changes, declared or not."""
    arguments = schema_of(op).arguments
    declared = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    if plain_name(op) in _UPDATES_STATISTICS:
        declared += [i for i, a in enumerate(arguments) if a.name in ("running_mean", "running_var")]
    return tuple(sorted(set(declared)))


def declares_writes(op: OpOverload) -> bool:
    """Whether the schema of an operator says that it writes. Batch norm, whose schema does not, writes statistics."""
    return bool(schema_of(op).is_mutable)


@lru_cache(maxsize=4096)
def write_condition(op: OpOverload) -> str:
    """The boolean argument that must be true for an operator to write ("" where it always does)."""
    return "" if declares_writes(op) else _UPDATES_STATISTICS.get(plain_name(op), "")


@lru_cache(maxsize=4096)
def returned_position(op: OpOverload) -> int | None:
    """The argument that an in-place operator writes and returns, if it is one tensor passed by position."""
    written = written_positions(op) if declares_writes(op) else ()
    if len(written) != 1 or len(schema_of(op).returns) != 1:
        return None
    argument, result = schema_of(op).arguments[written[0]], schema_of(op).returns[0]
    same = result.alias_info is not None and result.alias_info.before_set == argument.alias_info.before_set
    return written[0] if same and not argument.kwarg_only else None


@lru_cache(maxsize=4096)
def writes_into_out(op: OpOverload) -> bool:
    """Whether an operator writes its result into a tensor that it is given by keyword (`out=`)."""
    return any(schema_of(op).arguments[i].kwarg_only for i in written_positions(op))


@lru_cache(maxsize=4096)
def changes_layout(op: OpOverload) -> bool:
    """Whether an operator changes the layout or the storage of an argument that others may hold (`t_`, `resize_`)."""
    return torch.Tag.inplace_view in op.tags or _base_name(op) in _OTHER_STORAGE


def may_share(target: Any) -> bool:
    """Whether the result of an operator, or an element of a list, can share memory with an argument."""
    return target is operator.getitem or (isinstance(target, OpOverload) and bool(shared_positions(target)))


@lru_cache(maxsize=4096)
def shared_positions(op: OpOverload) -> tuple[int, ...]:
    """Schema positions of the arguments whose memory the results share: views, and tensors written and returned."""
    schema = schema_of(op)
    if plain_name(op) in _HIDDEN_VIEWS:
        return (0,)
    sets = [result.alias_info.before_set for result in schema.returns if result.alias_info is not None]
    shared: set[str] = set().union(*sets)
    # Of a list (`Tensor(a)[]`) the schema only tells that it is annotated: it may share with any annotated argument.
    is_list = not all(sets)
    return tuple(
        i
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and (is_list or a.alias_info.before_set & shared)
    )


def is_view_of_first(op: OpOverload) -> bool:
    """Whether a schema says that results share memory with the first argument, and with no other."""
    return not declares_writes(op) and shared_positions(op) == (0,)


def is_unsafe_split(target: Any) -> bool:
    """Whether an operator makes views that it declares to be new tensors. Cells of recurrent networks write into them,
    and so into the whole: it must not be recomputed from what it was split from."""
    return isinstance(target, OpOverload) and plain_name(target) in _UNSAFE_SPLITS


def reads_layout_only(target: Any) -> bool:
    """Whether an operator, function or method name gives a view or a size: it never reads the contents."""
    if isinstance(target, OpOverload):
        return plain_name(target) in _LAYOUT_ONLY
    if isinstance(target, str):
        return target in _LAYOUT_ONLY
    name = getattr(target, "__name__", "")
    return name in _LAYOUT_ONLY and getattr(torch, name, None) is target


@lru_cache(maxsize=4096)
def moves_elements(op: OpOverload) -> bool:
    """Whether an operator copies, casts or pads one tensor and computes nothing."""
    return op_name(op).removeprefix("aten::") in _COPIES


@lru_cache(maxsize=4096)
def returns_tensors(op: OpOverload) -> bool:
    """Whether an operator has a tensor, or a list of tensors, among its results."""
    return any("Tensor" in str(result.type) for result in schema_of(op).returns)


def is_measure(target: Any) -> bool:
    """Whether a target only asks a tensor for its geometry, which is known before its contents are."""
    return isinstance(target, OpOverload) and plain_name(target) in _MEASURES


@lru_cache(maxsize=4096)
def only_checks(op: OpOverload) -> bool:
    """Whether an operator is an assertion, a bound of a size or a mark of the profiler: it may run in any order."""
    return _namespace(op) == "profiler" or "_assert" in op_name(op) or "sym_constrain" in op_name(op)


def may_draw(target: Any) -> bool:
    """Whether an operator can draw random numbers."""
    return isinstance(target, OpOverload) and _may_draw(target)


@lru_cache(maxsize=4096)
def _may_draw(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def is_data_dependent(target: Any) -> bool:
    """Whether the value or the shape of a result depends on the contents of the arguments."""
    return isinstance(target, OpOverload) and _is_data_dependent(target)


@lru_cache(maxsize=4096)
def _is_data_dependent(op: OpOverload) -> bool:
    return torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags


def is_communication(target: Any) -> bool:
    """Whether a target starts a collective or waits for one."""
    return isinstance(target, OpOverload) and _namespace(target) in COLLECTIVE_NAMESPACES


def is_wait(target: Any) -> bool:
    """Whether a target waits for a collective."""
    return is_communication(target) and "wait_tensor" in _base_name(target)


def is_collective(target: Any) -> bool:
    """Whether a target starts a collective whose result must be waited on."""
    return is_communication(target) and "wait_tensor" not in _base_name(target)


def is_point_to_point(target: Any) -> bool:
    """Whether a target sends to, or receives from, single peers: that is no collective, and no two are the same."""
    return is_communication(target) and _base_name(target) in _POINT_TO_POINT


@dataclass(frozen=True)
class OperatorFacts:
    """What the tracer needs to know of one operator overload."""

    names: tuple[str, ...]
    """Argument names in schema order."""
    keyword_only: frozenset[str]
    """Arguments that cannot be given by position."""
    writes: tuple[int, ...]
    """Schema positions of the arguments whose contents change."""
    writes_if: str
    """Name of a boolean argument that must be true for `writes` to hold ("" for always)."""
    is_view: bool
    """The result shares memory with the first argument and nothing is written."""
    is_inplace_view: bool
    """Changes size or stride of its first argument, not its contents (`t_`, `unsqueeze_`)."""
    replaces_storage: bool
    """`set_`, `resize_`: the tensor gets other memory."""
    is_random: bool
    is_custom: bool
    """An operator of `torch.library`."""
    functional: OpOverload | None
    """Computes the written values out of place, as extra results after its own."""
    lost_defaults: tuple[tuple[str, object], ...]
    """Arguments that have a default here and none in the functional operator."""
    out_names: tuple[str, ...]
    """`out=` arguments: written, never read, and absent from the functional operator."""
    fresh_results: int
    """How many leading results of the operator do not alias a written argument."""


@cache
def operator_facts(op: OpOverload) -> OperatorFacts:
    """The facts of one overload."""
    schema = schema_of(op)
    is_inplace_view = torch.Tag.inplace_view in op.tags
    replaces_storage = _base_name(op) in _OTHER_STORAGE
    writes = written_positions(op)
    functional = functional_variant(op) if writes and not is_inplace_view else None
    return OperatorFacts(
        names=argument_names(op),
        keyword_only=frozenset(arg.name for arg in schema.arguments if arg.kwarg_only),
        writes=() if is_inplace_view else writes,
        writes_if=write_condition(op),
        is_view=not writes and any(r.alias_info is not None for r in schema.returns),
        is_inplace_view=is_inplace_view and not replaces_storage,
        replaces_storage=replaces_storage,
        is_random=may_draw(op),
        is_custom=is_custom_operator(op),
        functional=functional,
        lost_defaults=_lost_defaults(op, functional) if functional is not None else (),
        out_names=tuple(a.name for a in schema.arguments if a.is_out),
        fresh_results=fresh_results(op),
    )


@lru_cache(maxsize=4096)
def fresh_results(op: OpOverload) -> int:
    """How many results of an operator have memory of their own, by its schema."""
    return sum(1 for result in schema_of(op).returns if result.alias_info is None)


@lru_cache(maxsize=1024)
def in_place_variant(op: OpOverload) -> OpOverload | None:
    """The operator with the same arguments that writes the first one: `add_.Tensor` for `add.Tensor`."""
    if declares_writes(op):
        return None
    namespace, _, name = op_name(op).partition("::")
    base, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base + "_", None)
    found = getattr(packet, overload or "default", None)
    if not isinstance(found, OpOverload) or 0 not in written_positions(found):
        return None
    return found if _typed_arguments(found) == _typed_arguments(op) else None


@lru_cache(maxsize=4096)
def functional_variant(op: OpOverload) -> OpOverload | None:
    """The overload that returns what `op` writes, after its own results: same arguments, nothing mutated."""
    if is_custom_operator(op):
        return None  # another kernel, whatever its name says
    if plain_name(op) in _FUNCTIONAL_BY_HAND:
        found = find_overloads("aten", _FUNCTIONAL_BY_HAND[plain_name(op)])
        return next((o for o in found if overload_name(o) == "default"), None)
    base = _base_name(op)
    candidates: list[OpOverload] = []
    for name in (base.removesuffix("_"), base.removesuffix("_") + "_functional", base):
        candidates += find_overloads(_namespace(op), name)
    exact = [o for o in candidates if o is not op and _returns_what_is_written(o, op)]
    same_name = [o for o in exact if overload_name(o) == overload_name(op)]
    return next(iter(same_name or exact), None)


def view_variant(op: OpOverload) -> OpOverload | None:
    """`transpose.int` for `transpose_`: the operator that returns the view which `op` turns its argument into."""
    for candidate in find_overloads(_namespace(op), _base_name(op).removesuffix("_")):
        if not declares_writes(candidate) and _typed_arguments(candidate) == _typed_arguments(op):
            return candidate
    return None


def _returns_what_is_written(candidate: OpOverload, op: OpOverload) -> bool:
    """Whether an operator takes what `op` takes, aliases nothing, and returns one more value per written argument."""
    schema = schema_of(op)
    if declares_writes(candidate) or shared_positions(candidate):
        return False
    written = sum(1 for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    fresh = fresh_results(op)
    same = _typed_arguments(candidate) == _typed_arguments(op)
    return same and len(schema_of(candidate).returns) == fresh + written


def _typed_arguments(op: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema_of(op).arguments if not a.is_out]


def _lost_defaults(op: OpOverload, functional: OpOverload) -> tuple[tuple[str, object], ...]:
    required = {a.name for a in schema_of(functional).arguments if not a.has_default_value()}
    return tuple(
        (a.name, a.default_value) for a in schema_of(op).arguments if a.has_default_value() and a.name in required
    )


_IN_PLACE_NAMES = frozenset(
    "setitem delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()
)
_IN_PLACE_OPERATORS = frozenset(getattr(operator, name) for name in _IN_PLACE_NAMES)
_IN_PLACE_METHODS = frozenset(f"__{name}__" for name in _IN_PLACE_NAMES)
_DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial "
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout rrelu "
    "gumbel_softmax scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d "
    "fractional_max_pool3d normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ dropout_ "
    "alpha_dropout_ feature_dropout_ rrelu_ seed manual_seed set_rng_state get_rng_state".split()
)
_VIEWS = frozenset(
    "view view_as reshape reshape_as t adjoint transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze "
    "expand expand_as broadcast_to broadcast_tensors select narrow diagonal diag chunk split split_with_sizes "
    "tensor_split hsplit vsplit dsplit unbind unfold unflatten flatten ravel detach contiguous to type type_as float "
    "half double bfloat16 int long short bool cpu cuda getattr getitem real imag conj resolve_conj resolve_neg "
    "positive pos as_strided view_as_real view_as_complex atleast_1d atleast_2d atleast_3d meshgrid numpy data alias "
    "slice byte char cfloat cdouble chalf as_tensor asarray linalg_diagonal unsafe_chunk unsafe_split "
    "unsafe_split_with_sizes requires_grad_ squeeze_ unsqueeze_ dropout dropout1d dropout2d dropout3d alpha_dropout "
    "feature_dropout feature_alpha_dropout".split()
)
SOMETIMES_VIEWS = frozenset({"einsum", "conj_physical", "cartesian_prod", "chain_matmul", "linalg_multi_dot"})
"""Return an argument, or a view of it, if there is nothing to compute. The operators' schemas do not say it either."""

_OWN_MEMORY = frozenset({call_on_copies, *SIDE_EFFECTS})
"""Functions of this package that graphs call: their results share memory with no argument."""

_KNOWN_PACKAGES = frozenset({"torch", "_operator", "math", "builtins"})
_NORMS: frozenset[Any] = frozenset(
    {functional.batch_norm, torch.batch_norm, torch.native_batch_norm, functional.instance_norm, torch.instance_norm}
)
_INSTANCE_NORMS: frozenset[Any] = frozenset({functional.instance_norm, torch.instance_norm})
_LOOKUPS: frozenset[Any] = frozenset({functional.embedding, functional.embedding_bag})
_SWITCHING = ("_enter_", "_exit_", "enter_dual_level", "exit_dual_level", "_saved_tensors_hooks_", "_set_")
_NESTING = ("_increment_nesting", "_decrement_nesting")


def is_arithmetic(target: Any) -> bool:
    """Whether a target is a function of Python's `operator` or `math` that changes none of its arguments."""
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    return module == "math" or (module == "_operator" and name not in _IN_PLACE_NAMES)


def writes_by_name(node: fx.Node) -> bool:
    """Whether the name of a function or method says that it mutates its first argument."""
    if node.op == "call_method":
        name = str(node.target)
        return name in _IN_PLACE_METHODS or _is_in_place_name(name)
    if node.target in _IN_PLACE_OPERATORS:
        return True
    return _package(node.target) != "_operator" and _is_in_place_name(getattr(node.target, "__name__", ""))


def written_by_python(node: fx.Node) -> list[fx.Node]:
    """The arguments that a Python function or method mutates."""
    if node.op == "call_function" and is_arithmetic(node.target):
        return []
    written = nodes_in(_first(node)) if writes_by_name(node) else []
    if node.op == "call_function":
        written += [each for value in _written_without_a_name(node) for each in nodes_in(value)]
    written += nodes_in(node.kwargs.get("out"))
    return list(dict.fromkeys(written))


def _written_without_a_name(node: fx.Node) -> list[Any]:
    """The arguments that a function mutates although its name does not say so."""
    if node.target in _NORMS:
        flag = "use_input_stats" if node.target in _INSTANCE_NORMS else "training"
        uses_batch = argument(node, flag) not in (False, None)
        return [argument(node, "running_mean"), argument(node, "running_var")] if uses_batch else []
    if node.target in _LOOKUPS:
        # Rows that are looked up are scaled in place.
        return [] if argument(node, "max_norm") is None else [argument(node, "weight")]
    is_told = bool(node.args[1:] or node.kwargs) and argument(node, "inplace") is True
    return [argument(node, "input", _first(node))] if is_told else []


def drawn_by_python(node: fx.Node) -> bool:
    """Whether a Python function or method draws random numbers: not in eval mode, and not with probability 0."""
    target = node.target
    if target in SIDE_EFFECTS:
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name not in _DRAWS:
        return False
    if node.op != "call_function":
        return True
    if argument(node, "training") is False or argument(node, "train") is False:
        return False
    if target is functional.scaled_dot_product_attention:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(probability != 0.0)
    return True


def aliased_by_python(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of a Python function or method may share."""
    if node.op == "call_method":
        may_share = node.target in _VIEWS or node.target in SOMETIMES_VIEWS or bool(written_by_python(node))
        return node.all_input_nodes[:1] if may_share else []
    if node.target in _OWN_MEMORY:
        return []
    name = getattr(node.target, "__name__", "")
    is_known = _package(node.target) in _KNOWN_PACKAGES and name not in _VIEWS and name not in SOMETIMES_VIEWS
    return [] if is_known and not written_by_python(node) else node.all_input_nodes


def is_fence(target: Any) -> bool:
    """Whether a function of torch switches something for all that follows, other than grad mode and autocast."""
    name = getattr(target, "__name__", "")
    return _package(target) == "torch" and (name.startswith(_SWITCHING) or name.endswith(_NESTING))


def _package(target: Any) -> str:
    return str(getattr(target, "__module__", None) or "torch").partition(".")[0]


def _is_in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _first(node: fx.Node) -> Any:
    return node.args[0] if node.args else next(iter(node.kwargs.values()), None)
