"""The one effects-and-alias analysis: what a node reads, writes, aliases, draws, communicates and keeps alive.

    question                           of an operator          of a node                  of a graph
    what does it write?                written_positions       written_inputs, writes     written_roots, WriteWindows
    what may its result alias?         shared_positions        shared_inputs (by schema)  alias_roots, MemoryClasses
                                                               aliased_inputs (at most)
    does it read contents?             reads_layout_only       reads_contents
    does it draw random numbers?       may_draw                draws
    does it communicate?               is_collective, is_wait  communicates
    what does its result keep alive?                           stored_in                  find_storages
    what keeps its order, what stays?                          order_kind, is_needed      order_edges, GraphEffects

Answers about operators are read from schemas once per operator. Capture, passes, partition, lower, remat and
pipelining ask here; none of them reads a schema for its effects.
"""

from wholestep.ir.effects.nodes import (
    aliased_inputs,
    calls_custom_operator,
    communicates,
    draws,
    is_needed,
    is_new_element,
    keeps_elements,
    order_kind,
    reads_contents,
    shared_inputs,
    stored_in,
    writes,
    written_inputs,
)
from wholestep.ir.effects.order import (
    GraphEffects,
    MemoryClasses,
    OrderEdges,
    Storages,
    WriteWindows,
    alias_roots,
    find_storages,
    main_device,
    order_edges,
    read_by,
    sharing_with_outputs,
    written_roots,
)
from wholestep.ir.effects.targets import (
    COLLECTIVE_NAMESPACES,
    OperatorFacts,
    changes_layout,
    functional_variant,
    is_arithmetic,
    is_collective,
    is_communication,
    is_custom_operator,
    is_data_dependent,
    is_measure,
    is_point_to_point,
    is_unsafe_split,
    is_view_of_first,
    is_wait,
    may_draw,
    may_share,
    may_write,
    operator_facts,
    reads_layout_only,
    returned_position,
    returns_tensors,
    shared_positions,
    view_variant,
    write_condition,
    writes_into_out,
    written_positions,
)

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "GraphEffects",
    "MemoryClasses",
    "OperatorFacts",
    "OrderEdges",
    "Storages",
    "WriteWindows",
    "alias_roots",
    "aliased_inputs",
    "calls_custom_operator",
    "changes_layout",
    "communicates",
    "draws",
    "find_storages",
    "functional_variant",
    "is_arithmetic",
    "is_collective",
    "is_communication",
    "is_custom_operator",
    "is_data_dependent",
    "is_measure",
    "is_needed",
    "is_new_element",
    "is_point_to_point",
    "is_unsafe_split",
    "is_view_of_first",
    "is_wait",
    "keeps_elements",
    "main_device",
    "may_draw",
    "may_share",
    "may_write",
    "operator_facts",
    "order_edges",
    "order_kind",
    "read_by",
    "reads_contents",
    "reads_layout_only",
    "returned_position",
    "returns_tensors",
    "shared_inputs",
    "shared_positions",
    "sharing_with_outputs",
    "stored_in",
    "view_variant",
    "write_condition",
    "writes",
    "writes_into_out",
    "written_inputs",
    "written_positions",
    "written_roots",
]
