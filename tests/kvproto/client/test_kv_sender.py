"""Whether KV fits a prompt; transfers over sockets are in test_decode_client."""

import pytest

from kvproto.client.kv_sender import check_tokens
from kvproto.errors import LocalProtocolError
from kvproto.geometry import KvGeometry, Layer, Region

PROMPT = [5, 3, 8, 1, 9, 2, 7]


def test_kv_that_does_not_fit_the_prompt_is_refused(plain, compute, fake_decode):
    kv = compute(plain, PROMPT)
    with pytest.raises(LocalProtocolError, match="token 1 is 3 there and 4 here"):
        check_tokens(kv, (5, 4))
    with pytest.raises(LocalProtocolError, match="has 7 tokens, 8 are needed"):
        check_tokens(kv, (*PROMPT, 1))
    mixed = compute(fake_decode().geometry, PROMPT)
    with pytest.raises(LocalProtocolError, match="layer b no longer has the rows for fewer"):
        check_tokens(mixed, tuple(PROMPT[:-1]))
    check_tokens(mixed, tuple(PROMPT))


def test_a_state_per_sequence_is_that_of_all_tokens_alone(compute):
    state = KvGeometry((Layer("a", (Region("state", 2, 4, "sequence"),)),), "float32")
    check_tokens(compute(state, PROMPT), tuple(PROMPT))
    with pytest.raises(LocalProtocolError, match="layer a no longer has the rows"):
        check_tokens(compute(state, PROMPT), tuple(PROMPT[:-1]))
    window = KvGeometry.uniform(1, 2, 8, "float32", ["a"], windows_tokens=[32])
    # All tokens are within the window: nothing is gone yet.
    check_tokens(compute(window, PROMPT), tuple(PROMPT[:-1]))
