"""Writes the vectors of this folder: ``python -m tests.kvproto.golden.generate``.

Good messages are made by the code; bad frames and files are put together from bytes, as another
implementation would (``raw_frame``), so that nothing of ours decides what they look like.
"""

import json
import struct
from pathlib import Path
from typing import Any

from kvproto.frame import encode_frame
from kvproto.handshake import canary_bytes
from kvproto.header import ByteOrder, Header, Kind
from kvproto.messages import (
    FIELDS,
    Abort,
    AbortAck,
    Accepted,
    Attached,
    Auth,
    Commit,
    CommitAck,
    Describe,
    Description,
    Error,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    LayerRecord,
    Message,
    Offer,
    Ping,
    Placed,
    Pong,
    Prefill,
    PrefillWorker,
    Probe,
    QueuePairFacts,
    RegionRecord,
    Register,
    Registered,
    Renew,
    Started,
    Tokens,
    Write,
    encode_fields,
)
from kvproto.shape import Shape
from tests.kvproto.golden.bad_frames import bad_frame_vectors
from tests.kvproto.golden.kv_files import bad_kv_file_vectors, kv_file_vectors, region_vectors
from tests.kvproto.golden.plain import plain
from tests.kvproto.golden.raw_frame import PREFIX

FOLDER = Path(__file__).parent
_U24, _U32, _U64 = (1 << 24) - 1, (1 << 32) - 1, (1 << 64) - 1
_NONCE = bytes(range(32))
_FACTS: dict[str, str | int] = {"dtype": "float32", "num_layers": 2}
_PATTERN = [1.0, -2.0, 0.5, 4.0, 5.0, 6.0, 7.0, 8.0]
_LAYERS = [
    LayerRecord("layers.0", [RegionRecord("k", 1, 2, "token"), RegionRecord("v", 1, 2, "token")]),
    LayerRecord("layers.1", [RegionRecord("latent", 1, 512, "token")], 4096),
    LayerRecord("layers.2", [RegionRecord("state", 8, 64, "sequence")]),
]
_WRITE = Write("seq-1", 7, "layers.1", 16, 2)
# One head of two elements, K and V of two tokens: the body is _PATTERN in float32.
_WRITE_SHAPE = Shape(1, 1, 2, 2).encode()

MESSAGES: dict[str, Message] = {
    "hello": Hello(
        role="prefill",
        instance_id="p-1",
        version_min=1,
        version_max=1,
        nonce=_NONCE,
        facts=_FACTS,
        carriers=["mapped", "tcp"],
        max_payload_nbytes=_U64,
        dtypes=["float16", "int8"],
        link_id="link-1",
        lane=3,
    ),
    "auth": Auth(bytes(range(32, 64))),
    "error": Error(3, "Größe passt nicht", "dtype", ""),
    "ping": Ping(_U64),
    "pong": Pong(1 << 53),
    "register": Register(
        role="decode",
        instance_id="d-1",
        host="decode.example",
        port=65535,
        model="Modell ü",
        facts=_FACTS,
        max_model_len=8192,
        num_blocks=512,
        block_size=16,
    ),
    "registered": Registered(15.0),
    "renew": Renew("d-1", 1, 2, 1 << 40, _U32, draining=True),
    "describe": Describe(),
    "description": Description("m", 4096, "bfloat16", _LAYERS),
    "prefill": Prefill(
        "seq-1",
        7,
        tokens=[0, 1, 151643, _U32],
        timeout_s=2.5,
        carrier="mapped",
        block_table=[3, 0, 1048575],
        dtype="int8",
        first_head=4,
        num_heads=4,
        is_unchecked=True,
        heartbeat_s=0.5,
    ),
    "prefill_rdma": Prefill(
        "seq-1",
        7,
        tokens=[0, 1],
        timeout_s=2.5,
        carrier="rdma",
        block_table=[3],
        keys=[0x01020304, _U32],
    ),
    "started": Started("seq-1", 7, 0.25),
    "write": _WRITE,
    "write_unchecked": _WRITE,
    "commit": Commit(
        "seq-1",
        7,
        num_tokens=18,
        nbytes=_U64,
        digests=[1, 1 << 63, 3735928495, 0],
        queue_s=0.25,
        prefill_s=1.5,
        handoff_s=0.125,
        wire_error=0.0009765625,
    ),
    "commit_ack": CommitAck("seq-1", 7),
    "abort": Abort("seq-1", 7, 9, "client went away"),
    "abort_ack": AbortAck("seq-1", 7),
    "placed": Placed("seq-1", 7, "layers.1", 16, 2),
    "heartbeat": Heartbeat("seq-1", 7),
    "offer": Offer("mapped", _NONCE),
    "offer_rdma": Offer(
        "rdma",
        _NONCE,
        queue_pairs=[
            QueuePairFacts("::ffff:192.0.2.7", 17, _U24, 4096),
            QueuePairFacts("2001:db8:1234:5678:9abc:def0:1234:5678", _U24, 0, 256),
        ],
        byte_order=2,
        num_blocks=512,
        block_size=16,
        base=_U64,
        key=_U32,
    ),
    "attached": Attached("mapped", _NONCE, "no owner listens as d-1.sock"),
    "attached_rdma": Attached(
        "rdma", _NONCE, queue_pairs=[QueuePairFacts("fe80::1", 18, 1, 1024)], byte_order=1
    ),
    "probe": Probe("probe-1", 8, 32, "mapped", [5, 4]),
    "probe_rdma": Probe("probe-1", 8, 32, "rdma", [5, 4], [1, _U32]),
    "generate": Generate(
        sequence_id="seq-1",
        tokens=[1, 2, 3],
        num_prompt_tokens=2,
        max_output_tokens=100,
        temperature=0.7,
        top_p=0.95,
        top_k=40,
        seed=12345678901234567890,
        stop_token_ids=[2],
        ignore_eos=False,
        prefill_workers=[PrefillWorker("p-1", "127.0.0.1", 7401)],
        timeout_s=30.0,
        kv_from_sender=True,
    ),
    "accepted": Accepted("seq-1"),
    "tokens": Tokens("seq-1", 100, [5, _U32]),
    "finished": Finished(
        "seq-1", "stop", 0, "", {"prefill_s": 1.5, "num_output_tokens": 3, "carrier": "tcp"}
    ),
}


def body_of(name: str, order: ByteOrder) -> bytes:
    """The body of a message of ``MESSAGES``, as a host of this order sends it."""
    if name == "hello":
        return canary_bytes(order)
    if name.startswith("write"):
        return struct.pack(f"{PREFIX[order]}8f", *_PATTERN)
    return b""


def message_vectors() -> list[dict[str, Any]]:
    """messages.json."""
    vectors = []
    for order in ByteOrder:
        for name, message in MESSAGES.items():
            body = body_of(name, order)
            shape_word = _WRITE_SHAPE if name.startswith("write") else 0
            frame = encode_frame(
                message.kind,
                encode_fields(message, order),
                [body],
                shape_word=shape_word,
                order=order,
                is_body_checked=name != "write_unchecked",
            )
            vectors.append(
                {
                    "name": f"{name}-{order.name.lower()}",
                    "order": order.name,
                    "kind": message.kind.name,
                    "flags": int(name == "write_unchecked"),
                    "shape_word": hex(shape_word),
                    "fields": plain(message),
                    "body": body.hex(),
                    "hex": b"".join(frame).hex(),
                }
            )
    return vectors


def absent_field_vectors() -> list[dict[str, Any]]:
    """absent_fields.json: the required fields alone."""
    vectors = []
    for order in ByteOrder:
        for name, message in MESSAGES.items():
            required = {info.name for info in FIELDS[type(message)] if info.is_required}
            fields = encode_fields(message, order)
            if required == set(fields):
                continue
            kept = {key: value for key, value in fields.items() if key in required}
            body = body_of(name, order)
            frame = encode_frame(message.kind, kept, [body], order=order)
            read = type(message)(**{key: getattr(message, key) for key in required})
            vectors.append(
                {
                    "name": f"{name}-{order.name.lower()}",
                    "order": order.name,
                    "kind": message.kind.name,
                    "fields": plain(read),
                    "hex": b"".join(frame).hex(),
                }
            )
    return vectors


def header_vectors() -> list[dict[str, Any]]:
    """header.json."""
    headers = {
        "ping": (Kind.PING, 16, 0x01020304, 0, True),
        "write": (Kind.WRITE, 0x0102030405060708, 0xFFFEFDFC, 0x10080800001000, True),
        "largest": (Kind.FINISHED, _U64, _U32, _U64, True),
        "write_unchecked": (Kind.WRITE, 1 << 20, 0x01020304, 0x10080800001000, False),
        "kv_file": (Kind.KV_FILE, 1 << 30, 0x01020304, 0x180080400002000, False),
    }
    vectors = []
    for order in ByteOrder:
        for name, (kind, payload_nbytes, check, shape_word, is_body_checked) in headers.items():
            header = Header(kind, payload_nbytes, check, shape_word, order, is_body_checked)
            vectors.append(
                {
                    "name": f"{name}-{order.name.lower()}",
                    "order": order.name,
                    "kind": kind.name,
                    "flags": int(not is_body_checked),
                    "payload_nbytes": plain(payload_nbytes),
                    "payload_check": hex(check),
                    "shape_word": hex(shape_word),
                    "hex": header.encode().hex(),
                }
            )
    return vectors


FILES = {
    "header.json": header_vectors,
    "messages.json": message_vectors,
    "absent_fields.json": absent_field_vectors,
    "bad_frames.json": bad_frame_vectors,
    "kv_files.json": kv_file_vectors,
    "bad_kv_files.json": bad_kv_file_vectors,
    "region.json": region_vectors,
}


def main() -> None:
    """Write every file."""
    for name, vectors in FILES.items():
        text = json.dumps(vectors(), indent=2, ensure_ascii=False)
        (FOLDER / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
