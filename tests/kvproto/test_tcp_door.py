"""Who gets in, who must leave, and who never notices."""

import pytest

from kvproto.errors import Overloaded
from kvproto.tcp_door import Door, DoorLimits


def door(**limits: int) -> Door[str]:
    return Door(DoorLimits(**limits))


def test_a_stranger_becomes_a_guest_and_leaves():
    it = door()
    assert it.arrive("a", "host") is None
    assert it.stats()["num_handshakes"] == 1
    it.admit("a", "decode", "d")
    assert (it.stats()["num_handshakes"], it.stats()["num_peers"]) == (0, 1)
    it.leave("a")
    it.leave("a")
    assert (it.stats()["num_handshakes"], it.stats()["num_peers"]) == (0, 0)


def test_silent_strangers_of_one_address_make_room_for_each_other():
    it = door(max_handshakes_per_address=2)
    assert it.arrive("a", "bad") is None
    assert it.arrive("b", "bad") is None
    assert it.arrive("c", "good") is None
    assert it.arrive("d", "bad") == "a"
    assert it.arrive("e", "bad") == "b"
    assert it.stats()["num_handshakes"] == 3


def test_when_all_room_is_taken_the_address_with_the_most_gives():
    it = door(max_handshakes=4, max_handshakes_per_address=3)
    for visitor, address in (("a", "good"), ("b", "bad"), ("c", "bad"), ("d", "other")):
        assert it.arrive(visitor, address) is None
    assert it.arrive("e", "new") == "b"
    # Nobody has more than one now: the one that came first.
    assert it.arrive("f", "newer") == "a"
    assert it.stats() == {
        "num_peers": 0,
        "max_peers": 256,
        "num_handshakes": 4,
        "max_handshakes": 4,
    }


def test_strangers_never_take_the_room_of_guests():
    it = door(max_peers=1, max_handshakes=2)
    for number in range(10):
        it.arrive(f"s{number}", "bad")
    it.arrive("guest", "bad")
    it.admit("guest", "decode", "d")
    assert it.stats()["num_peers"] == 1


def test_a_full_house_takes_no_strangers():
    it = door(max_peers=1)
    it.arrive("a", "host")
    it.arrive("b", "host")
    it.admit("a", "decode", "d")
    with pytest.raises(Overloaded, match=r"serves 1 peers, its limit \(max_peers\)"):
        it.arrive("c", "host")
    # b came before the house was full.
    with pytest.raises(Overloaded, match="max_peers"):
        it.admit("b", "decode", "e")
    assert it.stats()["num_handshakes"] == 0
    it.leave("a")
    assert it.arrive("c", "host") is None


def test_connections_of_one_instance_are_bounded():
    it = door(max_peers_per_instance=2)
    for visitor in "ab":
        it.arrive(visitor, "host")
        it.admit(visitor, "decode", "d")
    it.arrive("c", "host")
    with pytest.raises(Overloaded, match=r"decode d has 2 connections .*max_peers_per_instance"):
        it.admit("c", "decode", "d")
    # The same name in another role is another instance.
    it.arrive("e", "host")
    it.admit("e", "prefill", "d")
    it.leave("a")
    it.arrive("f", "host")
    it.admit("f", "decode", "d")
    assert it.stats()["num_peers"] == 3


def test_one_who_had_to_leave_may_still_turn_out_to_be_honest():
    """It was asked to leave in the moment in which its handshake came through."""
    it = door(max_handshakes_per_address=1)
    it.arrive("a", "host")
    assert it.arrive("b", "host") == "a"
    it.admit("a", "decode", "d")
    it.leave("a")
    assert it.stats()["num_peers"] == 0
