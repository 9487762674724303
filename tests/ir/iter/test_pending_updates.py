"""What an IterGraphModule leaves for its next iteration: done once, to the right tensors, and never lost."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, fx, nn

from ir.iter.test_graph import Sides, moved_module, nodes, two_parameters
from wholestep.errors import PendingError
from wholestep.ir.iter.graph_module import IterGraphModule
from wholestep.passes import applied_passes, graph_optimization_pass

aten = torch.ops.aten
ONE = (torch.ones(3), 0.5)


def state() -> list[Tensor]:
    return [torch.ones(3), torch.full((3,), 2.0)]


def after(calls: int) -> list[Tensor]:
    """The state after some iterations of the graph alone."""
    found, plain = state(), two_parameters()
    for _ in range(calls):
        plain(*found, *ONE)
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("moved", [("p",), ("p", "q")])
def test_an_iteration_that_raises_does_not_apply_a_pending_update_twice(moved: tuple[str, ...]) -> None:
    module, mine = moved_module(*moved), state()
    module(*mine, *ONE)
    with pytest.raises(RuntimeError, match="must match"):
        module(*mine, torch.ones(7), 0.5)  # the update of p comes before the first use of x, that of q after it
    module.flush()
    assert same(mine, after(1))
    module(*mine, *ONE)
    module(*mine, *ONE, last_iter=True)
    assert same(mine, after(3))


def test_a_last_iteration_that_raises_can_be_called_again() -> None:
    module, mine = moved_module("p", "q"), state()
    module(*mine, *ONE)
    with pytest.raises(RuntimeError, match="must match"):
        module(*mine, torch.ones(7), 0.5, last_iter=True)
    module(*mine, *ONE, last_iter=True)
    assert same(mine, after(2))
    assert not module.has_pending


def test_an_iteration_that_raises_does_not_count() -> None:
    module, mine = moved_module("p", max_iters=2), state()
    module(*mine, *ONE)
    with pytest.raises(RuntimeError, match="must match"):
        module(*mine, torch.ones(7), 0.5)
    assert not module.has_pending
    module(*mine, *ONE)
    assert not module.has_pending
    assert same(mine, after(2))


def test_pending_updates_are_applied_to_their_own_tensors() -> None:
    module, first, second = moved_module("p", "q"), state(), state()
    module(*first, *ONE)
    module(*second, *ONE)
    assert same(first, after(1))
    module.flush()
    assert same(second, after(1))
    assert same(first, after(1))


def test_an_alias_of_the_same_memory_continues_the_sequence() -> None:
    module, mine = moved_module("p", "q"), state()
    module(*mine, *ONE)
    views = [tensor.detach() for tensor in mine]
    module(*views, *ONE)
    module.flush()
    assert same(mine, after(2))


def test_finalize_setup_completes_pending_updates() -> None:
    module, mine = moved_module("p", "q"), state()
    module(*mine, *ONE)
    module.finalize_setup()
    assert same(mine, after(1))
    assert not module.has_pending


def test_a_collected_module_completes_pending_updates() -> None:
    module, mine = moved_module("p", "q"), state()
    module(*mine, *ONE)
    del module
    gc.collect()
    assert same(mine, after(1))


def test_a_write_between_two_iterations_raises_once_instead_of_mixing_with_the_update() -> None:
    module, mine = moved_module("p", "q"), state()
    module(*mine, *ONE)
    mine[0].copy_(torch.zeros(3))
    with pytest.raises(PendingError, match="p was written while its update"):
        module(*mine, *ONE)
    module.flush()
    assert not module.has_pending
    module(*mine, *ONE)
    mine[1].data = torch.ones(3)
    with pytest.raises(PendingError, match="q was written"):
        module.flush()


def test_a_copy_of_a_module_has_the_moves_and_no_pending_updates() -> None:
    module, mine = moved_module("p", "q"), state()
    module(*mine, *ONE)
    other = copy.deepcopy(module)
    assert same(mine, after(1))
    assert not other.has_pending
    assert other.graph is not module.graph
    assert len(other.graph.moves) == 2
    assert {node.graph for move in other.graph.moves for node in move.nodes} == {other.graph}
    sides = Sides(other)
    for i in range(4):
        sides.call(last_iter=i == 3)
    sides.assert_same()
    with pytest.raises(RuntimeError, match="frozen"):
        other.graph.move_to_next_iter_before(nodes(other.graph, "grad_q"), nodes(other.graph, "loss")[0])


def test_a_copy_made_before_the_setup_is_final_can_be_edited_alone() -> None:
    module = IterGraphModule(two_parameters())
    other = copy.deepcopy(module)
    moving = nodes(other.graph, "step_p", "new_p", "write_p")
    other.graph.move_to_next_iter_before(moving, nodes(other.graph, "scaled")[0])
    other.finalize_setup()
    assert len(other.graph.moves) == 1
    assert not module.graph.moves


def test_names_of_the_old_api_are_there() -> None:
    module = IterGraphModule(two_parameters())
    moving = nodes(module.graph, "step_p", "new_p", "write_p")
    assert "write_p" in {n.name for n in module.graph.setup_graph.nodes}
    module.setup(3)
    module.graph.functionalize_optim()
    module.graph.move_to_next_iter_before(moving, nodes(module.graph, "scaled")[0])
    module.graph.defunctionalize_optim()
    assert "write_p" not in {n.name for n in module.graph.setup_graph.nodes}
    assert [n.target for n in module.graph.cleanup_graph.nodes].count(aten.copy_.default) == 3
    module.freeze_cross_iter_movement()
    sides = Sides(module)
    for left in (True, True, False):
        sides.call()
        assert module.has_pending == left
    sides.assert_same()
    with pytest.raises(ValueError, match="must be greater than 0"):
        module.setup()


def test_a_user_that_is_added_keeps_a_node_alive_until_it_is_removed() -> None:
    module = IterGraphModule(two_parameters())
    (last,) = nodes(module.graph, "loss")
    with module.graph.inserting_after(last):
        unused = module.graph.call_function(aten.neg.default, (last,))
    module.graph.node_add_user(unused, "__hold__")
    module.graph.eliminate_dead_code()
    assert unused in module.graph.nodes
    module.graph.node_remove_user(unused, "__hold__")
    module.graph.eliminate_dead_code()
    assert unused not in module.graph.nodes


@graph_optimization_pass()
def looks(gm: fx.GraphModule) -> None:
    """A pass that changes nothing."""


def test_the_passes_that_ran_are_known() -> None:
    module = IterGraphModule(two_parameters())
    assert isinstance(module, nn.Module)
    assert applied_passes(module) == ()
    looks(module)
    assert applied_passes(module) == ("looks",)  # type: ignore[arg-type]
