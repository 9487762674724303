from __future__ import annotations

import torch
from torch import fx

from wholestep.ir import rng


def test_a_state_that_is_put_back_draws_the_same_numbers_again() -> None:
    state = rng.get_rng_state("cpu")
    first = torch.rand(3)
    rng.set_rng_state(state, "cpu")
    assert torch.equal(torch.rand(3), first)
    assert state.dtype == torch.uint8
    assert state.device.type == "cpu"


def test_manual_seed_is_torchs() -> None:
    rng.manual_seed(5)
    ours = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), ours)


def test_a_graph_that_calls_them_replays_and_dead_code_elimination_keeps_them() -> None:
    graph = fx.Graph()
    graph.call_function(rng.manual_seed, (3,))
    state = graph.call_function(rng.get_rng_state, ("cpu",))
    first = graph.call_function(torch.ops.aten.rand.default, ([4],))
    graph.call_function(rng.set_rng_state, (state, "cpu"))
    second = graph.call_function(torch.ops.aten.rand.default, ([4],))
    graph.call_function(rng.get_rng_state, ("cpu",))
    graph.output((first, second))
    graph.eliminate_dead_code()
    assert [node.target for node in graph.nodes if node.target in rng.SIDE_EFFECTS] == [
        rng.manual_seed,
        rng.get_rng_state,
        rng.set_rng_state,
        rng.get_rng_state,
    ]
    a, b = fx.GraphModule({}, graph)()
    torch.manual_seed(3)
    assert torch.equal(a, torch.rand(4))
    assert torch.equal(a, b)
