"""Peak memory of ranks: activations live from a forward to the end of its backward."""

from __future__ import annotations

from wholestep.simulate.pipeline import Bytes, Times, simulate


def peak(lists, size: Bytes) -> tuple[int, ...]:
    return simulate(lists, Times(), bytes=size).peak_bytes


def test_an_activation_lives_until_the_end_of_its_backward():
    assert simulate([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]]).peak_activations == (2,)
    assert peak([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]], Bytes(activation=7, static=100)) == (114,)


def test_what_the_weight_backward_needs_is_saved_until_it_ends():
    lists = [["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]]
    assert simulate(lists).peak_activations == (2,)
    assert peak(lists, Bytes(activation=10)) == (20,)
    assert peak(lists, Bytes(activation=10, for_weights=4)) == (14,)


def test_all_stages_of_a_rank_count_each_with_its_own_size():
    lists = [["0F0", "1F0", "1B0", "0B0"]]
    assert peak(lists, Bytes(static=[1, 10], activation=[[100], [1000]])) == (1111,)


def test_a_received_value_is_alive_from_its_receive_to_the_end_of_its_use():
    lists = [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F0", "1F1"]]
    assert peak(lists, Bytes(arriving=5)) == (0, 10)
    assert peak(lists, Bytes(arriving=5, activation=1)) == (2, 11)


def test_the_forward_of_an_overlap_allocates_before_its_backward_releases():
    lists = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]
    assert simulate(lists).peak_activations == (2,)
    assert peak(lists, Bytes(activation=3)) == (6,)
