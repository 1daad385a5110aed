"""The JavaScript implementation and this one read what the other has written."""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from kvproto.fields import PackedUInts
from kvproto.frame import decode_frame, encode_frame
from kvproto.header import ByteOrder, Kind
from kvproto.messages import FIELDS, Message, decode_fields, encode_fields

_GOLDEN_FOLDER = Path(__file__).parents[1] / "kvproto" / "golden"
_ALL_GOLDEN = json.loads((_GOLDEN_FOLDER / "messages.json").read_text("utf-8"))
# What the example sends, and what it is sent.
_SENT = {"HELLO", "AUTH", "PONG", "DESCRIBE", "PREFILL", "STARTED", "WRITE", "COMMIT", "COMMIT_ACK"}
_SENT |= {"ABORT", "GENERATE"}
_RECEIVED = {"HELLO", "AUTH", "ERROR", "PING", "DESCRIPTION", "PREFILL", "STARTED", "WRITE"}
_RECEIVED |= {"COMMIT", "COMMIT_ACK", "ABORT", "HEARTBEAT", "ACCEPTED", "TOKENS", "FINISHED"}
_LIMIT = 1 << 20
_WORDS = {32: "u32", 64: "u64"}
# What the error says, by the code of the vector.
_ERRORS = {
    "BAD_MAGIC": "DE AD BE AF",
    "UNSUPPORTED_VERSION": "wire version",
    "BAD_BYTE_ORDER": "byte order",
    "CHECKSUM_MISMATCH": "damaged",
    "UNKNOWN_KIND": "kind",
    "PAYLOAD_TOO_LARGE": "a payload of",
    "MALFORMED": "",
}
# A short example is lenient with these: they neither claim memory nor change what is read.
_LENIENT = {
    *("padding_without_body", "padding_of_checked_body", "padding_of_unchecked_body"),
    *("descriptor_key_twice", "descriptor_nested_key_twice", "descriptor_key_bin"),
    *("descriptor_not_utf8", "descriptor_surrogate", "descriptor_array_above_limit"),
    *("descriptor_map_above_limit", "descriptor_str_above_limit"),
}

Harness = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def _decode(raw: bytes) -> dict[str, Any]:
    return {"task": "decode", "data": raw, "maxPayloadNbytes": _LIMIT}


def _encode(message: Message, body: bytes, shape_word: int) -> dict[str, Any]:
    return {
        "task": "encode",
        "kind": message.kind.name,
        "fields": _typed(message),
        "body": body,
        "shapeWord": str(shape_word),
    }


def _frame(vector: dict[str, Any]) -> bytes:
    return bytes.fromhex(vector["hex"])


def _message(raw: bytes) -> Message:
    frame = decode_frame(raw, max_payload_nbytes=_LIMIT)
    return decode_fields(frame.header.kind, frame.fields, frame.header.order)


def _typed(message: Message) -> dict[str, Any]:
    """The fields as the JavaScript side is given them: lists of words are typed arrays."""
    typed = {}
    plain = encode_fields(message, ByteOrder.LITTLE)
    for info in FIELDS[type(message)]:
        value = getattr(message, info.name)
        if isinstance(info.spec, PackedUInts):
            items = [str(item) for item in value] if info.spec.bits == 64 else value
            typed[info.name] = {_WORDS[info.spec.bits]: items}
        elif isinstance(value, int) and not isinstance(value, bool):
            typed[info.name] = {"big": str(value)} if value >= 1 << 53 else value
        elif info.name in plain:
            typed[info.name] = plain[info.name]
    return typed


def test_xxh3_of_every_length(harness: Harness) -> None:
    data = random.Random(3).randbytes(70000)
    # Every branch, and around the ends of stripes (64) and blocks (1024).
    lengths = [*range(9, 520), *range(1000, 1100), *range(2040, 2060), 65536, 65537, 70000]
    results = harness([{"task": "xxh3", "data": data[:length]} for length in lengths])
    for length, answer in zip(lengths, results, strict=True):
        assert answer == {"result": xxhash.xxh3_64_intdigest(data[:length])}, length


def test_javascript_reads_the_golden_frames(harness: Harness) -> None:
    vectors = [vector for vector in _ALL_GOLDEN if vector["kind"] in _RECEIVED]
    assert {vector["kind"] for vector in vectors} == _RECEIVED
    results = harness([_decode(_frame(vector)) for vector in vectors])
    for vector, answer in zip(vectors, results, strict=True):
        frame = decode_frame(_frame(vector), max_payload_nbytes=_LIMIT)
        assert answer.get("result") == {
            "kind": vector["kind"],
            "fields": frame.fields,
            "body": bytes.fromhex(vector["body"]),
            "order": int(ByteOrder[vector["order"]]),
            "shapeWord": str(int(vector["shape_word"], 16)),
        }, (vector["name"], answer)


def test_javascript_refuses_the_golden_bad_frames(harness: Harness) -> None:
    """Up to the descriptor: this example leaves types and limits of fields to its peer."""
    vectors = json.loads((_GOLDEN_FOLDER / "bad_frames.json").read_text("utf-8"))
    bad = [item for item in vectors if item["stage"] in {"header", "payload", "descriptor"}]
    answers = harness([_decode(_frame(vector)) for vector in bad])
    lenient, wrong = set(), []
    for vector, answer in zip(bad, answers, strict=True):
        if "error" not in answer:
            lenient.add(vector["name"].rpartition("-")[0])
        elif _ERRORS[vector["code"]] not in answer["error"]:
            wrong.append(f"{vector['name']}, {vector['code']}: {answer['error']}")
    assert not wrong, "\n".join(wrong)
    assert lenient <= _LENIENT


def test_we_read_the_golden_messages_as_javascript_writes_them(harness: Harness) -> None:
    """Without optional fields that differ from message to message: those of the vectors."""
    vectors = [
        vector
        for vector in _ALL_GOLDEN
        if vector["kind"] in _SENT and vector["order"] == sys.byteorder.upper()
    ]
    assert {vector["kind"] for vector in vectors} == _SENT
    messages, tasks = [], []
    for vector in vectors:
        message = _message(_frame(vector))
        # The example sends whole numbers for durations and sampling parameters.
        floats = {
            info.name: float(round(getattr(message, info.name)))
            for info in FIELDS[type(message)]
            if isinstance(getattr(message, info.name), float)
        }
        messages.append(replace(message, **floats))
        body, shape_word = bytes.fromhex(vector["body"]), int(vector["shape_word"], 16)
        tasks.append(_encode(messages[-1], body, shape_word))
    for vector, message, answer in zip(vectors, messages, harness(tasks), strict=True):
        frame = decode_frame(answer["result"], max_payload_nbytes=_LIMIT)
        header = frame.header
        assert header.kind.name == vector["kind"]
        assert header.order.name == vector["order"]
        assert header.shape_word == int(vector["shape_word"], 16)
        assert header.is_body_checked is (header.kind is not Kind.WRITE)
        assert bytes(frame.body) == bytes.fromhex(vector["body"])
        assert decode_fields(header.kind, frame.fields, header.order) == message, vector["name"]


def test_elements_in_both_orders(harness: Harness) -> None:
    values = {2: [1, 0xFFFE], 4: [0, 1, 151643, 0xFFFFFFFF], 8: [1, 1 << 63, 0, 3735928495]}
    tasks, expected = [], []
    for order in ByteOrder:
        for nbytes, numbers in values.items():
            name = order.name.lower()
            raw = b"".join(number.to_bytes(nbytes, name) for number in numbers)
            tasks.append(
                {"task": "reorder", "data": raw, "elementNbytes": nbytes, "order": int(order)}
            )
            expected.append(b"".join(number.to_bytes(nbytes, sys.byteorder) for number in numbers))
    assert [answer.get("result") for answer in harness(tasks)] == expected


def test_a_body_without_payload_check(harness: Harness) -> None:
    """The flag leaves the body out of the check, and nothing else."""
    vector = next(item for item in _ALL_GOLDEN if item["name"] == "write-little")
    ours = decode_frame(_frame(vector), max_payload_nbytes=_LIMIT)
    written = b"".join(
        encode_frame(
            Kind.WRITE,
            ours.fields,
            [ours.body],
            shape_word=ours.header.shape_word,
            order=ByteOrder.LITTLE,
            is_body_checked=False,
        )
    )
    other_body = written[:-1] + bytes([written[-1] ^ 1])
    other_start = written[:40] + bytes([written[40] ^ 1]) + written[41:]
    read, other, damaged = harness([*map(_decode, (written, other_body, other_start))])
    assert read["result"]["body"] == ours.body
    assert other["result"]["body"][-1] == ours.body[-1] ^ 1
    assert "damaged" in damaged["error"]


def test_every_flipped_byte_is_found(harness: Harness) -> None:
    raw = _frame(next(item for item in _ALL_GOLDEN if item["name"] == "write-big"))
    flipped = [raw[:i] + bytes([raw[i] ^ 0x10]) + raw[i + 1 :] for i in range(len(raw))]
    for index, answer in enumerate(harness([_decode(data) for data in flipped])):
        assert "error" in answer, index
