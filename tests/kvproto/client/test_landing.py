"""Leases in the client's own memory; transfers over sockets are in test_prefill_client."""

import pytest

from kvproto.client.landing import CacheLanding
from kvproto.errors import LeaseError, LocalProtocolError
from kvproto.header import HOST_ORDER
from kvproto.messages import Commit, Placed, Write

TOKENS = [5, 3, 8, 1, 9, 2, 7]


def test_the_landing_refuses_what_it_did_not_grant(compute, plain):
    landing = CacheLanding()
    with pytest.raises(LocalProtocolError, match="has granted no lease"):
        _ = landing.geometry
    with pytest.raises(LeaseError, match="unknown sequence s"):
        landing.destination(Write("s", 1, "a", 0, 1), 10, 0, "w")
    landing.grant("s", 1, compute(plain, TOKENS), writer="w")
    assert landing.geometry == plain
    assert (landing.landed_nbytes(1), landing.quiesced(1)) == (0, True)
    with pytest.raises(LocalProtocolError, match="generation 1 is in use"):
        landing.grant("t", 1, compute(plain, TOKENS), writer="w")
    with pytest.raises(LeaseError, match="leased for WRITE, not for PLACED"):
        landing.placed(Placed("s", 1, "a", 0, 1), "w")


def land(landing, write, layer, rows):
    """What a connection does with one WRITE."""
    raw = b"".join(rows)
    word = landing.geometry.shape_word(layer, write.num_tokens)
    unread = memoryview(raw)
    for target in landing.destination(write, len(raw), word, "w"):
        target[:] = unread[: target.nbytes]
        landing.received(write, target)
        unread = unread[target.nbytes :]
    landing.landed(write, HOST_ORDER)


def test_two_transfers_fill_their_own_caches(compute, plain):
    landing = CacheLanding()
    sources = {1: compute(plain, TOKENS), 2: compute(plain, TOKENS[1:])}
    caches = {}
    for generation, source in sources.items():
        caches[generation] = type(source)(plain, source.tokens)
        landing.grant(f"s{generation}", generation, caches[generation], writer="w")
    for layer, name in enumerate("abc"):
        for generation, source in sources.items():
            count = source.num_tokens
            write = Write(f"s{generation}", generation, name, 0, count)
            land(landing, write, layer, source.views(layer, 0, count))
    for generation, source in sources.items():
        nbytes = plain.prompt_nbytes(source.num_tokens)
        assert landing.landed_nbytes(generation) == nbytes
        commit = Commit(
            f"s{generation}", generation, source.num_tokens, nbytes, source.digests(), 0, 0, 0
        )
        assert landing.commit(commit) == source.digests()
        assert caches[generation].memory == source.memory
        landing.forget(generation)
    with pytest.raises(LeaseError, match="unknown sequence s1"):
        landing.destination(Write("s1", 1, "a", 0, 1), 1, 0, "w")


def test_a_write_half_received_keeps_a_revoked_lease(compute, plain):
    landing = CacheLanding()
    landing.grant("s", 1, compute(plain, TOKENS), writer="w")
    write = Write("s", 1, "a", 0, 1)
    landing.destination(write, plain.write_nbytes(0, 1), plain.shape_word(0, 1), "w")
    landing.revoke(1)
    assert not landing.quiesced(1)
    landing.abandoned(write)
    assert landing.quiesced(1)
    with pytest.raises(LeaseError):
        landing.destination(write, plain.write_nbytes(0, 1), plain.shape_word(0, 1), "w")
