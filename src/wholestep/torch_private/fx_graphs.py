"""FX graphs: parts of nodes, generated code, light graph modules. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import copy
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen
from torch.utils import _pytree as _pytree

NODE_PARTS = attrgetter("op", "target", "_args", "_kwargs", "name", "type")


NODE_ARGUMENTS = attrgetter("_args")


NODE_KEYWORDS = attrgetter("_kwargs")


NODE_SOURCES = attrgetter("_input_nodes")
"""What a node is, as one tuple, its arguments, and what it reads (the keys of a dict), without the cost of the
properties `args`, `kwargs` and `all_input_nodes`: verifier and pass manager look at every node of 50,000. Tried on
2.11 and 2.13."""


def call_targets(graph: fx.Graph) -> list[Any]:
    """What the `call_function` nodes of a graph call, each once, out of the table behind `find_nodes`. 2.11, 2.13."""
    table = graph._find_nodes_lookup_table.table
    return [target for (op, target), nodes in table.items() if op == "call_function" and nodes]


def has_plain_codegen(graph: fx.Graph) -> bool:
    """Whether a graph takes flat positional inputs (`Graph._codegen`, which `make_fx` replaces). 2.11, 2.13."""
    return type(graph._codegen) is CodeGen


def codegen_of(graph: fx.Graph) -> CodeGen:
    """What flattens a graph's inputs and rebuilds its outputs (`Graph._codegen`). 2.11, 2.13."""
    return graph._codegen


def lazy_graph_module(root: Any, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A graph module that makes its Python code when it is first called or looked at, not at each rewrite. 2.11, 2.13.

    (`torch.fx._lazy_graph_module._LazyGraphModule`.) Code is a tenth of a capture, and the runtime never calls it.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    made: fx.GraphModule = _LazyGraphModule(root, graph, name)
    return made


ASSERTIONS = frozenset({torch._assert, torch._assert_async})
"""Python functions that only check: FX counts them as side effects. 2.11, 2.13."""


def name_of_target(target: Any) -> str:
    """What FX calls a node with this target, before it makes the name unique (`Graph._target_to_str`). 2.11, 2.13."""
    return _NAMING._target_to_str(target)


_NAMING = fx.Graph()


def qualified_name(target: Any) -> str:
    """What torch's partitioner calls a function: "torch.ops.aten.view.default", "_operator.getitem"
    (`fx.node._get_qualified_name`). 2.11, 2.13."""
    return str(fx.node._get_qualified_name(target))


class GraphWriter:
    """Appends nodes to a new graph as `Graph.create_node` does, without looking through each argument. 2.11, 2.13.

    (`_graph_namespace`, `_insert`, `_find_nodes_lookup_table`, `_len`.) 5 us a node, where `create_node` takes 16: it
    flattens all arguments to warn of symbolic numbers. Only for graphs that no module owns yet, and nodes that are
    copies of legal ones.
    """

    __slots__ = ("_append", "_index", "_namespace", "graph")

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._namespace = self.graph._graph_namespace
        self._append: Any = self.graph._insert
        self._index = self.graph._find_nodes_lookup_table.insert

    def add(self, op: str, target: Any, args: Any, kwargs: Any, name: str, type_expr: Any, meta: Any) -> fx.Node:
        """A node at the end of the graph. `name` is made unique; `meta` is the node's own from now on."""
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
    """An empty graph module that owns `graph`, without a class and code of its own until it is called. 2.11, 2.13.

    What `GraphModule({}, graph)` is, at a third of its time and memory: `GraphModule` makes a class for each instance,
    which is needed only to hold the generated `forward`. Attributes are the caller's to assign.
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
        """`forward` of a module that was not compiled: who asks for it (torch.compile does) gets the compiled one."""

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
                # The name that torch gives to such classes: copies are then made from the class below it.
                own = type("GraphModuleImpl", (LightGraphModule,), {"__module__": __name__})
                own.__name__ = "GraphModule"
                object.__setattr__(self, "__class__", own)
            code = super()._real_recompile()
            type(self).ws_compiled = True
            for child in self.children():
                # Whoever runs this one runs them; dynamo cannot go through a module that is not compiled.
                if isinstance(child, LightGraphModule):
                    child.real_recompile()
            return code

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # Before the hooks: torch's lazy modules compile in `forward`, and then run their hooks a second time.
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
    """Let dead-code elimination keep calls of a module whose results are not used (`_is_impure`). 2.11, 2.13."""
    module._is_impure = True  # type: ignore[assignment]


def is_marked_impure(module: object) -> bool:
    """Whether calls of a module are kept although their results are not used (`_is_impure`). 2.11, 2.13."""
    return bool(getattr(module, "_is_impure", False))


def keep_calling_convention(m: fx.GraphModule, module: fx.GraphModule) -> None:
    """Let a module with the placeholders of `m` take and return its trees (`_codegen`, `_in_spec`). 2.11, 2.13."""
    codegen = m.graph._codegen
    if type(codegen) is CodeGen:
        return
    module.graph.set_codegen(copy.copy(codegen))
    for spec in ("_in_spec", "_out_spec"):
        if spec in vars(m):
            setattr(module, spec, getattr(m, spec))


def copy_codegen(old: fx.Graph, new: fx.Graph) -> None:
    """Let a graph with the same placeholders and output take and return the same trees. 2.11, 2.13."""
    new.set_codegen(copy.copy(old._codegen))
