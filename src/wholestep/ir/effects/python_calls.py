"""What calls of Python functions and methods do, in graphs of symbolic tracing and dynamo: known by name.

    x.add_(1), x.__iadd__(1), iadd(x, 1)     write x: the name says so
    relu6(x, True), add(a, b, out=c)         write x, c: an argument says so
    batch_norm(x, m, v, w, b, True)          writes m and v: neither says so
    x.reshape(-1), einsum("i->i", x)         may return x, or a view of it
    rand(3), dropout(x, 0.5, True)           draw random numbers; dropout(x, 0.5, False) returns x

A function that is not torch's or Python's own may return a view of every argument; it is assumed to write none.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from wholestep.ir.call_arguments import argument, nodes_in
from wholestep.ir.mutable import call_on_copies
from wholestep.ir.rng import SIDE_EFFECTS

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
