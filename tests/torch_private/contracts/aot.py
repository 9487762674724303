"""What wholestep relies on in `torch_private/aot.py`."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx

from torch_private.contract_table import contracts_of
from wholestep.torch_private import aot

of = contracts_of("aot")
aten = torch.ops.aten


class Compiled:
    """A compiler that keeps the graphs that it was given, and AOTAutograd's names of them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.names: list[str] = []

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.names.append(aot.graph_being_compiled())

        def boxed(values: list[Any]) -> Any:
            given = list(values)
            values.clear()
            return gm(*given)

        return aot.mark_boxed(boxed)

    def targets(self, i: int) -> set[Any]:
        return {node.target for node in self.graphs[i].graph.nodes if node.op == "call_function"}


def loss_of(x: Tensor, w: Tensor) -> Tensor:
    return (torch.mm(x, w).sin().cos() * torch.rand(2, 2)).sum()


def gradient(function: Callable[..., Tensor]) -> Tensor:
    torch.manual_seed(0)
    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    function(x, w).backward()
    assert w.grad is not None
    return w.grad


@of("mark_boxed", "aot_function", "default_partition", "graph_being_compiled", "decompositions_of")
def forward_and_backward_are_traced_at_the_first_call() -> None:
    compiled = Compiled()
    table = aot.decompositions_of([aten.addmm, aten.native_layer_norm])
    assert aten.addmm.default in table
    function = aot.aot_function(
        loss_of,
        fw_compiler=compiled,
        bw_compiler=compiled,
        partition_fn=aot.default_partition,
        decompositions=table,
        keep_inference_input_mutations=True,
    )
    assert not compiled.graphs
    assert torch.equal(gradient(function), gradient(loss_of))
    assert len(compiled.graphs) == 2
    assert aten.rand.default in compiled.targets(0) - compiled.targets(1)
    assert [name.split("_")[-2] for name in compiled.names] == ["forward", "backward"]
    assert aot.graph_being_compiled() == ""


@of("min_cut_partition", "extract_forward_backward")
def partitions_save_little_or_what_they_are_told() -> None:
    compiled = Compiled()
    function = aot.aot_function(loss_of, fw_compiler=compiled, bw_compiler=compiled, partition_fn=aot.min_cut_partition)
    assert torch.equal(gradient(function), gradient(loss_of))
    assert aten.rand.default in compiled.targets(0) - compiled.targets(1)  # saved, not drawn again
    saved = list[str]()

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **settings: Any) -> Any:
        keep = [node for node in joint.graph.nodes if node.target in (aten.mm.default, aten.rand.default)][:2]
        keep += joint.graph.find_nodes(op="placeholder")[:2]
        saved.extend(node.name for node in keep)
        return aot.extract_forward_backward(joint, keep, num_fwd_outputs, settings)

    told = Compiled()
    function = aot.aot_function(loss_of, fw_compiler=told, bw_compiler=told, partition_fn=partition)
    assert torch.equal(gradient(function), gradient(loss_of))
    given = {node.name for node in told.graphs[1].graph.find_nodes(op="placeholder")}
    assert given <= {*saved, *(name for name in given if name.startswith("tangents"))}
    assert aten.sin.default in told.targets(1)


@of("aot_backend", "aot_simplified")
def backends_of_torch_compile_get_forward_and_backward() -> None:
    compiled = Compiled()
    backend = aot.aot_backend(fw_compiler=compiled, bw_compiler=compiled, decompositions={})
    assert torch.allclose(gradient(torch.compile(loss_of, backend=backend)), gradient(loss_of))
    assert len(compiled.graphs) == 2
    torch._dynamo.reset()

    def simplified(gm: fx.GraphModule, inputs: Any) -> Any:
        return aot.aot_simplified(gm, inputs, fw_compiler=compiled, bw_compiler=compiled)

    assert torch.allclose(gradient(torch.compile(loss_of, backend=simplified)), gradient(loss_of))
    assert len(compiled.graphs) == 4
    torch._dynamo.reset()


@of("inductor_decompositions")
def inductors_table_leaves_random_operators_alone() -> None:
    table = aot.inductor_decompositions()
    assert aten.addmm.default in table or aten.native_layer_norm.default in table
    assert aten.rand.default not in table
    assert aten.native_dropout.default not in table
    assert table is not aot.inductor_decompositions()


@of("jit_without_autocast", "jit_remove_mutation")
def torchscript_adds_no_casts_and_removes_writes() -> None:
    def write(x: Tensor) -> Tensor:
        y = x + 1
        y.add_(2)
        return y

    assert torch._C._jit_set_autocast_mode(True)
    with aot.jit_without_autocast():
        scripted = torch.jit.script(write)
        assert torch._C._jit_set_autocast_mode(False) is False
    assert torch._C._jit_set_autocast_mode(True) is True
    assert "add_(" in str(scripted.graph)
    aot.jit_remove_mutation(scripted.graph)
    assert "add_(" not in str(scripted.graph)


@of("is_dynamo_tracing", "call_untraced", "behind_dynamo")
def code_knows_whether_dynamo_traces_it_and_can_be_left_out() -> None:
    seen = list[bool]()
    compiled = Compiled()

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        compiled.graphs.append(gm)
        return gm.forward

    def step(x: Tensor) -> Tensor:
        x = x.sin() if aot.is_dynamo_tracing() else x.cos()
        return x + aot.call_untraced(noted, x)

    def noted(x: Tensor) -> Tensor:
        seen.append(aot.is_dynamo_tracing())
        return x.tan()

    x = torch.ones(2)
    assert torch.equal(torch.compile(step, backend=backend)(x), x.sin() + x.sin().tan())
    assert torch.equal(step(x), x.cos() + x.cos().tan())
    assert seen == [False, False]
    assert torch.tan not in {node.target for gm in compiled.graphs for node in gm.graph.nodes}
    torch._dynamo.reset()
    wrapped = torch._disable_dynamo(noted)
    assert isinstance(wrapped, types.FunctionType)
    assert aot.behind_dynamo(wrapped) is noted
    assert aot.behind_dynamo(noted) is noted
    disable: Any = torch._dynamo.disable
    assert aot.behind_dynamo(disable(noted)) is noted
    for name in ("__init__", "__setstate__"):
        tagged = vars(torch.nn.Module)[name]
        own = aot.behind_dynamo(tagged)
        assert (tagged.__module__, own.__module__) == ("torch._dynamo.mutation_guard", "torch.nn.modules.module")


@of("trace_log_is_written", "write_artefact")
def artefacts_are_written_into_the_log_that_tlparse_reads() -> None:
    from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter

    log = logging.getLogger("torch.__trace")
    assert not aot.trace_log_is_written()
    level, handlers = log.level, list(log.handlers)
    with TemporaryDirectory() as folder:
        handler = LazyTraceHandler(folder)
        handler.setFormatter(TorchLogsFormatter(trace=True))
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        try:
            assert aot.trace_log_is_written()
            aot.write_artefact(3, 1, "wholestep_graph", "text of the artefact", "string")
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            handler.close()
        text = "".join(path.read_text() for path in Path(folder).iterdir())
    assert log.handlers == handlers
    assert '"artifact": {"name": "wholestep_graph", "encoding": "string"' in text
    assert '"frame_id": 3, "frame_compile_id": 1' in text
    assert "text of the artefact" in text
