"""Inductor, imported at first use because that takes two seconds. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._subclasses import fake_tensor as _fake_tensor

from wholestep.torch_private.operators import OpOverload
from wholestep.torch_private.symbolic_shapes import _some_shape_env


@contextmanager
def _warnings_of_torch_ignored() -> Iterator[None]:
    """Ignore warnings about parts of torch that Inductor itself uses; if warnings are errors it would fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def decomposed(
    function: Callable[..., Any], inputs: list[Any], mode: Any, *, settings: dict[str, Any], functionalize: bool
) -> fx.GraphModule:
    """Trace a function on fake inputs with Inductor's decomposition table. Tried on 2.11 and 2.13.

    `settings`: of Inductor; some select decompositions, and `emulate_precision_casts` marks nodes in the trace.
    `functionalize`: writes become values, as in AOT; views stay views (`view_copy` ops do not take symbolic sizes).
    """
    with _warnings_of_torch_ignored():
        import torch._inductor.lowering  # the lowering of max pooling needs it and does not import it
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        with config.patch(settings), mode, torch.no_grad():
            if functionalize:
                function = torch.func.functionalize(function, remove="mutations")
            traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
    found: fx.GraphModule = traced
    return found


def keeps_roundings() -> bool:
    """Whether `emulate_precision_casts` works on the CPU too: before 2.13 kernels reused values from before their
    rounding (pytorch#185337)."""
    return _is_at_least(2, 13)


def keeps_order_of_random_ops() -> bool:
    """Whether Inductor never reorders random ops. 2.11 does (`reorder_for_locality`, and its scheduler for in-place
    random ops), and computes `randn_like` of a transposed tensor row by row."""
    return _is_at_least(2, 13)


def _is_at_least(*version: int) -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= version


def compile_inductor(
    gm: fx.GraphModule, inputs: list[Any], settings: dict[str, Any], part: str = "", given_away: Sequence[int] = ()
) -> Callable[[list[Any]], Any]:
    """Compile a decomposed graph of tensors; the result takes one list, which it empties. Tried on 2.11 and 2.13.

    `part`: "forward" or "backward" of a training step. `given_away`: donated inputs of a backward, whose memory it may
    reuse (Inductor finds them in the tracing context).
    """
    output = next(iter(reversed(gm.graph.nodes)))
    # Results keep the strides of the trace, because their users assume them.
    # Only tensors are listed: the gradient of an input without one is None.
    output.meta["user_visible_output_idxs"] = [i for i, v in enumerate(output.args[0]) if isinstance(v, fx.Node)]
    mode = next((value.fake_mode for value in inputs if isinstance(value, _fake_tensor.FakeTensor)), None)
    with _warnings_of_torch_ignored():
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        context: Any = TracingContext(mode)
        if given_away:
            context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(given_away), static_input_indices=[])
        _name_inputs_for_the_cache(gm, given_away)
        patched = config.patch({"triton.cudagraphs": False, **settings})
        with patched, _some_shape_env(mode), tracing(context), torch.no_grad():
            compiled: Any = compile_fx_inner(gm, inputs, is_inference=not part, is_backward=part == "backward")
    return compiled  # type: ignore[no-any-return]


def _name_inputs_for_the_cache(gm: fx.GraphModule, given_away: Sequence[int]) -> None:
    """Inductor's cache on disk is keyed by the text of a graph, without the donated inputs and the fixed strides of
    results: a graph of torch.compile may have the same text. So the names of our inputs carry both."""
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.name = node.target = f"ws_given_{i}" if i in given_away else f"ws_{i}"
    gm.recompile()


def improve_joint(gm: fx.GraphModule, inputs: list[Any], settings: dict[str, Any]) -> fx.GraphModule:
    """Inductor's passes on a joint graph, before it is split into forward and backward: patterns, constant folding,
    its own random ops. Tried on 2.11 and 2.13."""
    with _warnings_of_torch_ignored():
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V

        mode = next((value.fake_mode for value in inputs if isinstance(value, _fake_tensor.FakeTensor)), None)
        with config.patch(settings), tracing(TracingContext(mode)), V.set_fake_mode(mode), torch.no_grad():
            improved: fx.GraphModule = joint_graph_passes(gm)
    return improved


def min_cut(joint: fx.GraphModule, forward_outputs: int, inputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's min-cut choice of what is saved for the backward and what is recomputed. The joint graph has `inputs`
    placeholders called primals_*, then tangents_*; its first outputs are the forward's. Tried on 2.11 and 2.13."""
    with _warnings_of_torch_ignored():
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        with _random_ops_not_merged(joint):
            forward, backward = min_cut_rematerialization_partition(
                joint, None, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=list(range(inputs))
            )
    return forward, backward


@contextmanager
def _random_ops_not_merged(gm: fx.GraphModule) -> Iterator[None]:
    """torch's partitioner merges nodes that compute the same. It has a list of most random operators, without
    `randn_like` and those of libraries; add the random ops of a graph (`compile_utils.rand_ops`). 2.11, 2.13."""
    from torch._functorch.compile_utils import rand_ops

    called = [node.target for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
    drawing = {op.overloadpacket for op in called if torch.Tag.nondeterministic_seeded in op.tags}
    missing = [packet for packet in drawing if packet not in rand_ops]
    rand_ops.extend(missing)
    try:
        yield
    finally:
        for packet in missing:
            rand_ops.remove(packet)


def unknown_inductor_settings(settings: Iterable[Any]) -> list[Any]:
    """The names that `torch._inductor.config` does not have. Imports Inductor only if there are any. 2.11, 2.13."""
    names = list(settings)
    known = inductor_settings() if names else ()
    return [name for name in names if name not in known]


def inductor_settings() -> frozenset[str]:
    """The names of Inductor's settings (`torch._inductor.config`). 2.11, 2.13."""
    with _warnings_of_torch_ignored():
        from torch._inductor import config

        return frozenset(config.get_config_copy())


def saved_kernels() -> bytes:
    """What Inductor compiled in this process, as bytes that contain pickles (`torch.compiler.save_cache_artifacts`).
    2.11, 2.13."""
    with _warnings_of_torch_ignored():
        found = torch.compiler.save_cache_artifacts()
    return b"" if found is None else bytes(found[0])


def load_kernels(raw: bytes) -> None:
    """Put what `saved_kernels` gave into Inductor's caches. It is unpickled: only for bytes that the user trusts.
    2.11, 2.13."""
    with _warnings_of_torch_ignored():
        torch.compiler.load_cache_artifacts(raw)
