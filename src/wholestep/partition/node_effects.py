"""What running a node does besides making its value: for ATen operators by schema, for Python code by what is known.

Graphs come from `make_fx` (operators with schemas), but also from symbolic tracing (functions, methods, modules). There
an in-place method ends in an underscore, `out=` and `inplace=True` write, and names of torch tell who draws random
numbers and who returns a view.
"""

from __future__ import annotations

import operator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from wholestep.ir.comm_block import communicates
from wholestep.ir.effects import is_collective, is_wait, may_write, shared_inputs
from wholestep.ir.iter.moves import written_inputs
from wholestep.ir.mutable import call_on_copies
from wholestep.ir.rng import SIDE_EFFECTS
from wholestep.partition.python_calls import is_fence, is_switched_off, written_by_function
from wholestep.torch_private.autograd import MODE_SWITCHES
from wholestep.torch_private.fake_tensors import storage_of
from wholestep.torch_private.fx_graphs import ASSERTIONS
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload, op_name, plain_name, schema_of

RANDOM, COLLECTIVE, EFFECT = "random", "collective", "effect"

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem "
    "delitem".split()
)
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
_SOMETIMES_VIEWS = frozenset({"einsum", "conj_physical", "cartesian_prod", "chain_matmul", "linalg_multi_dot"})
"""Return an argument, or a view of it, if there is nothing to compute; their schemas do not say it."""
_PLAIN_MODULES = ("torch", "_operator", "math", "builtins")
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)


class EffectReader:
    """The effects of all nodes of a graph, read once."""

    def __init__(self, nodes: list[fx.Node], root: nn.Module | None = None) -> None:
        self.tokens: dict[fx.Node, tuple[str, ...]] = {}
        """What a node takes part in: nodes with a common token keep their order."""
        self.written: dict[fx.Node, list[fx.Node]] = {}
        """The arguments whose contents a node changes."""
        self.switches: set[fx.Node] = set()
        """Nodes that turn grad mode or autocast on or off for all that follow."""
        self.fences: set[fx.Node] = set()
        """Nodes that switch something else (inference mode, `vmap`): nothing passes them."""
        self.same: dict[fx.Node, fx.Node] = {}
        """For each attribute that is a tensor, the first one of the same memory."""
        self.held: dict[fx.Node, list[fx.Node]] = {}
        """Attributes whose memory lies in the module that a node calls."""
        self._pure = set[int]()
        self._root = root if root is not None or not nodes else nodes[0].graph.owning_module
        self._modules: dict[str, _ModuleEffects] = {}
        for node in nodes:
            if node.op == "call_function":
                self._read_function(node)
            elif node.op == "call_method":
                self._read_named(node, str(node.target))
            elif node.op == "call_module":
                self._read_module(node)
        if self.written or self._modules:
            self._read_attributes(nodes)

    def shares(self, node: fx.Node) -> list[fx.Node]:
        """The arguments whose memory the result of a node may share."""
        target = node.target
        if node.op == "call_function":
            if isinstance(target, OpOverload):
                if plain_name(target) in _SOMETIMES_VIEWS:
                    return node.all_input_nodes
                # In eval mode dropout returns its argument, which its schema does not say.
                return node.all_input_nodes[:1] if "dropout" in plain_name(target) else shared_inputs(node)
            if target is operator.getitem:
                return shared_inputs(node)
            name, home = getattr(target, "__name__", ""), str(getattr(target, "__module__", None) or "torch")
            plain = home.split(".")[0] in _PLAIN_MODULES
            may_share = not plain or name in _VIEWS or name in _SOMETIMES_VIEWS or node in self.written
            return node.all_input_nodes if may_share else []
        if node.op == "call_method":
            may_share = target in _VIEWS or target in _SOMETIMES_VIEWS or node in self.written
            return node.all_input_nodes[:1] if may_share else []
        if node.op == "call_module":
            return node.all_input_nodes if self._module(str(target)).shares else []
        return []

    def _read_function(self, node: fx.Node) -> None:
        target: Any = node.target
        if id(target) in self._pure:
            return
        if target in MODE_SWITCHES:
            self.switches.add(node)
        elif isinstance(target, OpOverload):
            self._read_operator(node, target)
        elif target is call_on_copies:
            self._read_copied(node)
        elif target in SIDE_EFFECTS:
            self.tokens[node] = (RANDOM,)
        elif target in _IN_PLACE_OPERATORS:
            self.written[node] = _first(node)
        elif target is operator.getitem:
            self._pure.add(id(target))
        else:
            self._read_named(node, getattr(target, "__name__", ""))
            if is_fence(target):
                self.fences.add(node)
            if isinstance(target, HigherOrderOperator):
                self._read_bodies(node)
            if node not in self.tokens and node not in self.written and _is_effect(node):
                self.tokens[node] = (EFFECT,)

    def _read_operator(self, node: fx.Node, op: OpOverload) -> None:
        if is_collective(op):
            self.tokens[node] = (COLLECTIVE,)
        elif torch.Tag.nondeterministic_seeded in op.tags:
            if _draws_now(node, op):
                self.tokens[node] = (RANDOM,)
        elif not may_write(op):
            if node.is_impure() and not _only_checks(op):
                self.tokens[node] = (EFFECT,)
            else:
                self._pure.add(id(op))
        if may_write(op) and (written := written_inputs(node)):
            self.written[node] = written

    def _read_copied(self, node: fx.Node) -> None:
        op = node.args[0]
        if communicates(node):
            self.tokens[node] = (COLLECTIVE,)
        elif isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
            self.tokens[node] = (RANDOM,)

    def _read_named(self, node: fx.Node, name: str) -> None:
        if name in _DRAWS and _is_random(node):
            self.tokens[node] = (RANDOM,)
        written = _first(node) if _is_in_place(name) else []
        if node.op == "call_function":
            written += written_by_function(node)
        out = node.kwargs.get("out")
        written += [each for each in (out if isinstance(out, list | tuple) else [out]) if isinstance(each, fx.Node)]
        if written:
            self.written[node] = written

    def _read_module(self, node: fx.Node) -> None:
        effects = self._module(str(node.target))
        if effects.tokens:
            self.tokens[node] = effects.tokens
        if effects.writes and node.all_input_nodes:
            self.written[node] = list(node.all_input_nodes)

    def _read_attributes(self, nodes: list[fx.Node]) -> None:
        """Tensors that the graph gets may be another one under another name, or lie in a module that it calls."""
        first: dict[int, fx.Node] = {}
        for node in nodes:
            value = self._lookup(str(node.target)) if node.op == "get_attr" else None
            if isinstance(value, Tensor):
                self.same[node] = first.setdefault(_memory(value), node)
        for node in nodes if first else ():
            if node.op == "call_module":
                effects = self._module(str(node.target))
                self.held[node] = [first[each] for each in effects.holds if each in first]
                if updated := [first[each] for each in effects.updates if each in first]:
                    self.written[node] = [*self.written.get(node, ()), *updated]

    def _read_bodies(self, node: fx.Node) -> None:
        """`cond` and the like do what the graphs do that they are given."""
        bodies = [self._module(str(arg.target)) for arg in node.all_input_nodes if arg.op == "get_attr"]
        tokens = dict.fromkeys(token for body in bodies for token in body.tokens)
        if tokens:
            self.tokens[node] = tuple(tokens)
        if any(body.writes for body in bodies):
            self.written[node] = [arg for arg in node.all_input_nodes if arg.op != "get_attr"]

    def _module(self, target: str) -> _ModuleEffects:
        found = self._modules.get(target)
        if found is None:
            value = self._lookup(target)
            module = value if isinstance(value, nn.Module) else None  # get_attr may name a tensor
            found = self._modules[target] = _ModuleEffects(module)
        return found

    def _lookup(self, target: str) -> Any:
        value: Any = self._root
        for atom in target.split("."):
            value = getattr(value, atom, None)
        return value


class _ModuleEffects:
    """What calling a module does; of modules that are not torch's own, what their children are known to do."""

    def __init__(self, module: nn.Module | None) -> None:
        tokens: dict[str, None] = {}
        self.updates: list[int] = []
        """The memory of buffers that it may change."""
        self._module = module
        self.writes = False
        self.shares = module is None
        for part in module.modules() if module is not None else ():
            if not type(part).__module__.startswith("torch.nn.") or isinstance(part, _VIEW_MODULES):
                self.shares = True
            if part.training and _draws(part):
                tokens[RANDOM] = None
            if updates := _updated(part):
                self.updates += map(_memory, updates)
                tokens[f"buffers of {id(part)}"] = None
            if getattr(part, "inplace", False) is True:
                self.writes = self.shares = True
            if "Dropout" in type(part).__name__:
                self.shares = True  # in eval mode, the argument itself
            if isinstance(part, fx.GraphModule):
                inner = EffectReader(list(part.graph.nodes), part)
                tokens.update(dict.fromkeys(token for each in inner.tokens.values() for token in each))
                self.writes = self.writes or bool(inner.written)
        self.tokens = tuple(tokens)

    @cached_property
    def holds(self) -> list[int]:
        """The memory of its parameters and buffers."""
        if self._module is None:
            return []
        return [*map(_memory, self._module.parameters()), *map(_memory, self._module.buffers())]


def _updated(module: nn.Module) -> list[Tensor]:
    """What a module of torch, or one that is not known, may change of its own state."""
    if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return [module.weight]
    return list(module.buffers(recurse=False)) if module.training else []


def _memory(tensor: Tensor) -> int:
    return storage_of(tensor) if tensor.layout is torch.strided else id(tensor)


def _draws(module: nn.Module) -> bool:
    if "Dropout" in type(module).__name__ or isinstance(module, nn.RReLU):
        return bool(getattr(module, "p", 1.0))
    dropout = getattr(module, "dropout", 0.0)  # attention and recurrent networks
    return isinstance(dropout, float) and bool(dropout > 0.0)


def _is_random(node: fx.Node) -> bool:
    """Whether a function that can draw does: not in eval mode, and not with probability 0."""
    if node.op == "call_function" and is_switched_off(node):
        return False
    if node.target is torch.nn.functional.scaled_dot_product_attention:
        chance = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(chance != 0.0)
    return True


def _draws_now(node: fx.Node, op: OpOverload) -> bool:
    """Whether an operator that can draw does: not with `train=False`, and attention and RNNs not without dropout."""
    for i, argument in enumerate(schema_of(op).arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        if argument.name in ("train", "training") and value is False:
            return False
        if argument.name in ("dropout_p", "dropout") and isinstance(value, float) and value == 0.0:
            return False
    return True


def _is_effect(node: fx.Node) -> bool:
    return node.target is print or (node.is_impure() and node.target not in ASSERTIONS)


def _only_checks(op: OpOverload) -> bool:
    """Asserts, bounds of sizes, marks of the profiler and waits: in another order they do the same."""
    return is_wait(op) or op.namespace == "profiler" or "_assert" in op_name(op) or "sym_constrain" in op_name(op)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _first(node: fx.Node) -> list[fx.Node]:
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    return [first] if isinstance(first, fx.Node) else []
