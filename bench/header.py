"""What one frame costs beside its bytes: header and small messages, encoded and decoded.

    python bench/header.py [--max-us 5]

Prints the best of several rounds in microseconds. With ``--max-us`` it exits with 1 if encoding or
decoding a header takes longer.
"""

import argparse
import timeit
from collections.abc import Callable

from kvproto.frame import decode_frame, encode_frame
from kvproto.header import HOST_ORDER, Header, Kind
from kvproto.messages import Tokens, Write, decode_fields, encode_fields

NUM_ROUNDS = 7
NUM_CALLS = 20_000
MAX_PAYLOAD_NBYTES = 1 << 26


def best_us(call: Callable[[], object]) -> float:
    """Microseconds of one call, in the round that was disturbed least."""
    rounds = timeit.repeat(call, number=NUM_CALLS, repeat=NUM_ROUNDS)
    return min(rounds) / NUM_CALLS * 1e6


def message_costs(message: Tokens | Write) -> tuple[float, float]:
    """(encode, decode) of a whole frame without a body."""

    def encode() -> bytes:
        fields = encode_fields(message, HOST_ORDER)
        return b"".join(encode_frame(message.kind, fields, order=HOST_ORDER))

    raw = encode()

    def decode() -> object:
        frame = decode_frame(raw, max_payload_nbytes=MAX_PAYLOAD_NBYTES)
        return decode_fields(frame.header.kind, frame.fields, HOST_ORDER)

    return best_us(encode), best_us(decode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-us", type=float, help="fail above this many microseconds")
    max_us = parser.parse_args().max_us
    header = Header(Kind.WRITE, 1 << 20, 0x12345678, 1 << 52 | 2 << 40 | 64 << 28 | 512)
    raw = memoryview(header.encode())
    costs = {
        "header": (
            best_us(header.encode),
            best_us(lambda: Header.decode(raw, max_payload_nbytes=MAX_PAYLOAD_NBYTES)),
        ),
        "TOKENS frame": message_costs(Tokens("sequence-0001", 17, [151643])),
        "WRITE frame, no body": message_costs(Write("sequence-0001", 3, "layers.7", 512, 512)),
    }
    print(f"{'':24}{'encode us':>10}{'decode us':>10}")
    for name, (encode_us, decode_us) in costs.items():
        print(f"{name:24}{encode_us:10.2f}{decode_us:10.2f}")
    if max_us is not None and max(costs["header"]) > max_us:
        print(f"FAIL: a header costs more than {max_us:g} us")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
