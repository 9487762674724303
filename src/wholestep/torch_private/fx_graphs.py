"""FX graphs and pytrees: fast access to nodes, generated code, graph modules that compile late, containers of tensors.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import chain, compress
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.graph import CodeGen
from torch.utils import _pytree as _pytree

pytree = _pytree
"""torch's Python pytree module, in whose registry users and Hugging Face register their containers. 2.11, 2.13."""


def pytree_children(tree: object) -> list[object] | None:
    """The children of a registered pytree node, one level down; None for a leaf. 2.11, 2.13."""
    if pytree.tree_is_leaf(tree):
        return None
    children, _ = pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    return children


NODE_ARGUMENTS = attrgetter("_args")
NODE_KEYWORDS = attrgetter("_kwargs")
NODE_SOURCES = attrgetter("_input_nodes")
"""The arguments of a node, its keyword arguments, and its input nodes (the keys of a dict), without the cost of the
properties `args`, `kwargs` and `all_input_nodes`: verifier and pass manager read all nodes of graphs with 50,000. Tried
on 2.11 and 2.13."""


class NodeParts(NamedTuple):
    """What a node is."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    type: Any


_COLUMNS = tuple(map(attrgetter, ("op", "target", "_args", "_kwargs", "name", "type")))
_READ = (1, 2, 3)
"""The columns that decide what a node gives."""


class NodeTable:
    """What the nodes of a graph are, by column: made and compared without Python code for each node. 2.11, 2.13."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes
        self._columns = [list(map(of_node, nodes)) for of_node in _COLUMNS]

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        """Where each node was."""
        return dict(zip(self.nodes, range(len(self.nodes)), strict=True))

    def parts(self, node: fx.Node) -> NodeParts:
        """What a node was."""
        i = self.place[node]
        return NodeParts(*(column[i] for column in self._columns))

    def __iter__(self) -> Iterator[NodeParts]:
        return map(NodeParts, *self._columns)

    def is_current(self) -> bool:
        """True if all nodes are what they were."""
        return not any(any(self._changes(i)) for i in range(len(_COLUMNS)))

    def changed(self) -> dict[fx.Node, None]:
        """The nodes that call another target, or have other arguments."""
        return dict.fromkeys(chain.from_iterable(compress(self.nodes, self._changes(i)) for i in _READ))

    def _changes(self, column: int) -> Iterator[bool]:
        return map(is_not, map(_COLUMNS[column], self.nodes), self._columns[column])


def call_targets(graph: fx.Graph) -> list[Any]:
    """The distinct targets of `call_function` nodes in a graph, from the table behind `find_nodes`. 2.11, 2.13."""
    table = graph._find_nodes_lookup_table.table
    return [target for (op, target), nodes in table.items() if op == "call_function" and nodes]


def has_plain_codegen(graph: fx.Graph) -> bool:
    """Whether a graph takes flat positional inputs (`Graph._codegen`, which `make_fx` replaces). 2.11, 2.13."""
    return type(graph._codegen) is CodeGen


def codegen_of(graph: fx.Graph) -> CodeGen:
    """The code generator of a graph, which flattens inputs and rebuilds outputs (`Graph._codegen`). 2.11, 2.13."""
    return graph._codegen


def lazy_graph_module(root: Any, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A graph module that generates its Python code at the first call or read, not at each rewrite. 2.11, 2.13.

    (`torch.fx._lazy_graph_module._LazyGraphModule`.) Code generation is a tenth of the time of a capture, and the
    runtime does not use that code.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    made: fx.GraphModule = _LazyGraphModule(root, graph, name)
    return made


ASSERTIONS = frozenset({torch._assert, torch._assert_async})
"""Python functions that only check a condition; FX counts them as side effects. 2.11, 2.13."""


def name_of_target(target: Any) -> str:
    """FX's name for a node with this target, before it is made unique (`Graph._target_to_str`). 2.11, 2.13."""
    return _NAMING._target_to_str(target)


_NAMING = fx.Graph()


def qualified_name(target: Any) -> str:
    """The name of a function in torch's partitioner: "torch.ops.aten.view.default", "_operator.getitem"
    (`fx.node._get_qualified_name`). 2.11, 2.13."""
    return str(fx.node._get_qualified_name(target))


class GraphWriter:
    """Appends nodes to a new graph as `Graph.create_node` does, without checking each argument. 2.11, 2.13.

    (`_graph_namespace`, `_insert`, `_find_nodes_lookup_table`, `_len`.) Takes 5 us a node; `create_node` takes 16,
    because it flattens all arguments to warn of symbolic scalars. Only for graphs that no module owns yet, and for
    copies of legal nodes.
    """

    __slots__ = ("_append", "_index", "_namespace", "graph")

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._namespace = self.graph._graph_namespace
        self._append: Any = self.graph._insert
        self._index = self.graph._find_nodes_lookup_table.insert

    def add(self, op: str, target: Any, args: Any, kwargs: Any, name: str, type_expr: Any, meta: Any) -> fx.Node:
        """Append a node. `name` is made unique; the node takes ownership of `meta`."""
        graph = self.graph
        unique = self._namespace.create_name(name, None)
        node = fx.Node(graph, unique, op, target, args, kwargs, type_expr)
        if meta is not None:
            node.meta = meta
        self._namespace._obj_to_name[node] = unique
        self._append(node)
        self._index(node)
        graph._len += 1
        return node


def light_graph_module(graph: fx.Graph, training: bool) -> fx.GraphModule:
    """A graph module without attributes that owns `graph`; class and code come with the first call. 2.11, 2.13.

    The same as `GraphModule({}, graph)` at a third of the time and memory: `GraphModule` creates a class for each
    instance, which is needed only to hold the generated `forward`. The caller assigns attributes.
    """
    cls, template = _light_class()
    module: fx.GraphModule = object.__new__(cls)
    state = module.__dict__
    for key, value in template:
        # In the order of `GraphModule.__init__`, so that instances share the keys of their dictionaries.
        state[key] = value() if isinstance(value, type) else value
    state["_graph"] = graph
    state["training"] = training
    graph.owning_module = module
    return module


@lru_cache(maxsize=1)
def _light_class() -> tuple[type[fx.GraphModule], list[tuple[str, Any]]]:
    from torch.fx._lazy_graph_module import _LazyGraphModule

    class Forward:
        """`forward` of a module without code: reading it (as torch.compile does) generates the code."""

        def __get__(self, module: Any, cls: Any) -> Any:
            if module is None:
                return LightGraphModule._lazy_forward
            module.real_recompile()
            return module.forward

    class LightGraphModule(_LazyGraphModule):
        __jit_unused_properties__ = [*_LazyGraphModule.__jit_unused_properties__, "code"]  # noqa: RUF012
        forward = Forward()
        ws_compiled = False  # read by dynamo, which may not look into `_needs_recompile`

        @classmethod
        def recompile(cls) -> None:  # type: ignore[override]
            cls.forward, cls.ws_compiled = Forward(), False

        def _real_recompile(self) -> Any:
            if type(self) is LightGraphModule:
                # With torch's name for such classes, copies are instances of the class below it.
                own = type("GraphModuleImpl", (LightGraphModule,), {"__module__": __name__})
                own.__name__ = "GraphModule"
                object.__setattr__(self, "__class__", own)
            code = super()._real_recompile()
            type(self).ws_compiled = True
            for child in self.children():
                # They run with this module, and Dynamo cannot trace a module without code.
                if isinstance(child, LightGraphModule):
                    child.real_recompile()
            return code

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # Before the hooks run: torch's lazy modules generate code in `forward`, and then run hooks a second time.
            if not self.ws_compiled:
                self.real_recompile()
                return self(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    LightGraphModule.__name__ = "GraphModule"
    containers = (dict, set, list)
    state = vars(_LazyGraphModule({}, fx.Graph()))
    template = [(k, type(v) if isinstance(v, containers) else v) for k, v in state.items()]
    return LightGraphModule, template


def mark_impure(module: torch.nn.Module) -> None:
    """Mark a module so that dead-code elimination keeps unused calls of it (`_is_impure`). 2.11, 2.13."""
    module._is_impure = True  # type: ignore[assignment]


def is_marked_impure(module: object) -> bool:
    """Whether dead-code elimination keeps unused calls of a module (`_is_impure`). 2.11, 2.13."""
    return bool(getattr(module, "_is_impure", False))


def keep_calling_convention(m: fx.GraphModule, module: fx.GraphModule) -> None:
    """Give a module with the placeholders of `m` the pytree inputs and outputs of `m` (`_codegen`, `_in_spec`).
    2.11, 2.13."""
    codegen = m.graph._codegen
    if type(codegen) is CodeGen:
        return
    module.graph.set_codegen(copy.copy(codegen))
    for spec in ("_in_spec", "_out_spec"):
        if spec in vars(m):
            setattr(module, spec, getattr(m, spec))


def copy_codegen(old: fx.Graph, new: fx.Graph) -> None:
    """Give a graph with the same placeholders and output the same pytree inputs and outputs. 2.11, 2.13."""
    new.set_codegen(copy.copy(old._codegen))
