"""Every message, with the type and limit of each field.

A message is a frozen dataclass; the ``Annotated`` part of a field is its wire type, which both
encoding and decoding check. A field with a default may be absent on the wire. Fields a receiver
does not know are skipped, unless their name starts with "!": those are critical and refused.
``SENDERS`` says which roles may send which message.

Source: docs/wire.md section 4 (a test compares its tables with this file).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final

from kvproto.errors import LocalProtocolError, UnexpectedMessage
from kvproto.fields import (
    MAX_U32,
    MAX_U64,
    Blob,
    Boolean,
    Choice,
    FieldError,
    PackedUInts,
    Real,
    ScalarMap,
    Text,
    TextList,
    UInt,
)
from kvproto.geometry import MAX_LAYER_NAME_NBYTES, MAX_LAYER_REGIONS
from kvproto.header import ByteOrder, Kind
from kvproto.record import FieldInfo, RecordList, decode_record, encode_record, field_infos
from kvproto.shape import MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, MAX_SEQ_LEN

NONCE_NBYTES: Final = 32
MAC_NBYTES: Final = 32
MAX_TOKENS: Final = 1 << 20
MAX_PREFILL_WORKERS: Final = 16
MAX_BLOCKS: Final = 1 << 20
MAX_LANES: Final = 16
MAX_QUEUE_PAIRS: Final = 16
ROLES: Final = ("prefill", "decode", "router", "client")

_ROLE: Final = Choice(ROLES)
_INSTANCE_ID: Final = Text(64, 1, ascii_only=True)
_SEQUENCE_ID: Final = Text(64, 1, ascii_only=True)
_OPTIONAL_SEQUENCE_ID: Final = Text(64, 0, ascii_only=True)
_HOST: Final = Text(253, 1, ascii_only=True)
_PORT: Final = UInt(65535, 1)
_SENTENCE: Final = Text(1024, is_cut=True)
_U32: Final = UInt(MAX_U32)
_U64: Final = UInt(MAX_U64)
_U24: Final = UInt((1 << 24) - 1)
_TOKEN_COUNT: Final = UInt(MAX_TOKENS)
_SECONDS: Final = Real(1e6)
_FACTS: Final = ScalarMap(64, allow_float=False)
_PROMPT: Final = PackedUInts(32, MAX_TOKENS, 1)
_KEYS: Final = PackedUInts(32, MAX_QUEUE_PAIRS)
_BLOCK_TABLE: Final = PackedUInts(32, MAX_BLOCKS)
_NAME: Final = Text(MAX_LAYER_NAME_NBYTES, 1, ascii_only=True)
_DTYPE: Final = Text(16, 1, ascii_only=True)
_OPTIONAL_DTYPE: Final = Text(16, ascii_only=True)
_CARRIER: Final = Text(16, 1, ascii_only=True)
_OPTIONAL_CARRIER: Final = Text(16, ascii_only=True)
# A header's byte-order byte, or 0: not said.
_BYTE_ORDER: Final = UInt(2)


@dataclass(frozen=True, slots=True)
class QueuePairFacts:
    """What the other end of an RDMA connection must know of a queue pair."""

    gid: Annotated[str, Text(39, 2, ascii_only=True)]
    qp_num: Annotated[int, _U24]
    psn: Annotated[int, _U24]
    mtu_nbytes: Annotated[int, UInt(4096, 256)]


_QUEUE_PAIRS: Final = RecordList(MAX_QUEUE_PAIRS, QueuePairFacts)


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of each side. The body is the 64-byte canary."""

    kind: ClassVar[Kind] = Kind.HELLO
    role: Annotated[str, _ROLE]
    instance_id: Annotated[str, _INSTANCE_ID]
    version_min: Annotated[int, UInt(255, 1)]
    version_max: Annotated[int, UInt(255, 1)]
    nonce: Annotated[bytes, Blob(NONCE_NBYTES)]
    facts: Annotated[dict[str, str | int], _FACTS]
    carriers: Annotated[list[str], TextList(8, _CARRIER)]
    max_payload_nbytes: Annotated[int, _U64]
    dtypes: Annotated[list[str], TextList(16, _DTYPE)] = field(default_factory=list)
    link_id: Annotated[str, Text(64, ascii_only=True)] = ""
    lane: Annotated[int, UInt(MAX_LANES - 1)] = 0


@dataclass(frozen=True, slots=True)
class Auth:
    """Second frame of each side: proof of the shared secret, all zero if there is none."""

    kind: ClassVar[Kind] = Kind.AUTH
    mac: Annotated[bytes, Blob(MAC_NBYTES)]


@dataclass(frozen=True, slots=True)
class Error:
    """Something failed. ``sequence_id`` empty: the connection itself, which ends."""

    kind: ClassVar[Kind] = Kind.ERROR
    code: Annotated[int, _U32]
    message: Annotated[str, _SENTENCE]
    field: Annotated[str, Text(128)] = ""
    sequence_id: Annotated[str, _OPTIONAL_SEQUENCE_ID] = ""


@dataclass(frozen=True, slots=True)
class Ping:
    """Sign of life; answered by PONG."""

    kind: ClassVar[Kind] = Kind.PING
    token: Annotated[int, _U64]


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to PING, with its token."""

    kind: ClassVar[Kind] = Kind.PONG
    token: Annotated[int, _U64]


@dataclass(frozen=True, slots=True)
class Register:
    """A worker offers itself to the router."""

    kind: ClassVar[Kind] = Kind.REGISTER
    role: Annotated[str, _ROLE]
    instance_id: Annotated[str, _INSTANCE_ID]
    host: Annotated[str, _HOST]
    port: Annotated[int, _PORT]
    model: Annotated[str, Text(256)]
    facts: Annotated[dict[str, str | int], _FACTS]
    max_model_len: Annotated[int, _U32]
    num_blocks: Annotated[int, _U32]
    block_size: Annotated[int, _U32]


@dataclass(frozen=True, slots=True)
class Registered:
    """The router's promise to keep a worker for ``lease_s`` after each RENEW."""

    kind: ClassVar[Kind] = Kind.REGISTERED
    lease_s: Annotated[float, _SECONDS]


@dataclass(frozen=True, slots=True)
class Renew:
    """A worker's load, and the renewal of its lease at the router."""

    kind: ClassVar[Kind] = Kind.RENEW
    instance_id: Annotated[str, _INSTANCE_ID]
    num_running: Annotated[int, _U32]
    num_waiting: Annotated[int, _U32]
    num_waiting_tokens: Annotated[int, _U64]
    num_free_blocks: Annotated[int, _U32]
    draining: Annotated[bool, Boolean()]


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks a worker what its KV looks like; answered by DESCRIPTION."""

    kind: ClassVar[Kind] = Kind.DESCRIBE


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """One tensor of one layer; see ``geometry.Region``."""

    name: Annotated[str, _NAME]
    num_heads: Annotated[int, UInt(MAX_KV_HEADS, 1)]
    head_dim: Annotated[int, UInt(MAX_HEAD_DIM, 1)]
    per: Annotated[str, Choice(("token", "sequence"))]


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer; see ``geometry.Layer``."""

    name: Annotated[str, _NAME]
    regions: Annotated[list[RegionRecord], RecordList(MAX_LAYER_REGIONS, RegionRecord)]
    window_tokens: Annotated[int, UInt(MAX_SEQ_LEN)] = 0


@dataclass(frozen=True, slots=True)
class Description:
    """A worker's model and the layout of its KV, for peers that have no checkpoint."""

    kind: ClassVar[Kind] = Kind.DESCRIPTION
    model: Annotated[str, Text(256)]
    max_model_len: Annotated[int, _U32]
    dtype: Annotated[str, _DTYPE]
    layers: Annotated[list[LayerRecord], RecordList(MAX_LAYERS, LayerRecord)]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Decode asks for the KV of ALL of ``tokens``; it already left off the last prompt token.

    ``carrier`` "" is TCP; a carrier that writes into memory needs ``block_table``, and ``keys``
    if it has any. ``dtype`` "" is
    the dtype of the asker's facts, ``num_heads`` 0 all heads. ``heartbeat_s``: how often at least
    the asker wants a HEARTBEAT until STARTED; 0 is never.
    """

    kind: ClassVar[Kind] = Kind.PREFILL
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]
    tokens: Annotated[list[int], _PROMPT]
    timeout_s: Annotated[float, _SECONDS]
    carrier: Annotated[str, _OPTIONAL_CARRIER] = ""
    block_table: Annotated[list[int], _BLOCK_TABLE] = field(default_factory=list)
    dtype: Annotated[str, _OPTIONAL_DTYPE] = ""
    first_head: Annotated[int, UInt(MAX_KV_HEADS)] = 0
    num_heads: Annotated[int, UInt(MAX_KV_HEADS)] = 0
    is_unchecked: Annotated[bool, Boolean()] = False
    heartbeat_s: Annotated[float, _SECONDS] = 0.0
    keys: Annotated[list[int], _KEYS] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Started:
    """Prefill began computing; decode's transfer deadline starts here."""

    kind: ClassVar[Kind] = Kind.STARTED
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]
    queue_s: Annotated[float, _SECONDS]


@dataclass(frozen=True, slots=True)
class Write:
    """The regions of some tokens of one layer, in the body."""

    kind: ClassVar[Kind] = Kind.WRITE
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]
    layer: Annotated[str, _NAME]
    first_token: Annotated[int, UInt(MAX_SEQ_LEN)]
    num_tokens: Annotated[int, UInt(MAX_SEQ_LEN, 1)]


@dataclass(frozen=True, slots=True)
class Placed:
    """As WRITE, but the bytes lie in the receiver's memory already: a carrier put them there."""

    kind: ClassVar[Kind] = Kind.PLACED
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]
    layer: Annotated[str, _NAME]
    first_token: Annotated[int, UInt(MAX_SEQ_LEN)]
    num_tokens: Annotated[int, UInt(MAX_SEQ_LEN, 1)]


@dataclass(frozen=True, slots=True)
class Commit:
    """All of a transfer was sent; what it must add up to."""

    kind: ClassVar[Kind] = Kind.COMMIT
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]
    num_tokens: Annotated[int, UInt(MAX_SEQ_LEN)]
    nbytes: Annotated[int, _U64]
    digests: Annotated[list[int], PackedUInts(64, MAX_LAYER_REGIONS * MAX_LAYERS)]
    queue_s: Annotated[float, _SECONDS]
    prefill_s: Annotated[float, _SECONDS]
    handoff_s: Annotated[float, _SECONDS]
    wire_error: Annotated[float, Real(1e6)] = 0.0


@dataclass(frozen=True, slots=True)
class CommitAck:
    """The receiver checked counts and digests; the transfer is complete."""

    kind: ClassVar[Kind] = Kind.COMMIT_ACK
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a transfer, or (generation 0, router to decode) a whole sequence."""

    kind: ClassVar[Kind] = Kind.ABORT
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]
    code: Annotated[int, _U32]
    message: Annotated[str, _SENTENCE]


@dataclass(frozen=True, slots=True)
class AbortAck:
    """The sender's promise that no further WRITE of that generation will follow."""

    kind: ClassVar[Kind] = Kind.ABORT_ACK
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The writer still has a transfer in its queue; sent until STARTED."""

    kind: ClassVar[Kind] = Kind.HEARTBEAT
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]


@dataclass(frozen=True, slots=True)
class Offer:
    """The owner of a region asks the writer to attach to it; answered by ATTACHED.

    What follows ``nonce`` is for "rdma" alone: one end of each connection, the order of numbers in
    the owner's memory, its pool, and where the pool begins for the holder of ``key``. ``key`` 0:
    each PREFILL brings keys of its own, for which the pool begins at 0.
    """

    kind: ClassVar[Kind] = Kind.OFFER
    carrier: Annotated[str, _CARRIER]
    nonce: Annotated[bytes, Blob(NONCE_NBYTES)]
    queue_pairs: Annotated[list[QueuePairFacts], _QUEUE_PAIRS] = field(default_factory=list)
    byte_order: Annotated[int, _BYTE_ORDER] = 0
    num_blocks: Annotated[int, _U32] = 0
    block_size: Annotated[int, _U32] = 0
    base: Annotated[int, _U64] = 0
    key: Annotated[int, _U32] = 0


@dataclass(frozen=True, slots=True)
class Attached:
    """Whether the writer reaches the offered region; ``reason`` "" means that it does.

    ``queue_pairs`` and ``byte_order`` are the writer's, for "rdma".
    """

    kind: ClassVar[Kind] = Kind.ATTACHED
    carrier: Annotated[str, _CARRIER]
    nonce: Annotated[bytes, Blob(NONCE_NBYTES)]
    reason: Annotated[str, _SENTENCE] = ""
    queue_pairs: Annotated[list[QueuePairFacts], _QUEUE_PAIRS] = field(default_factory=list)
    byte_order: Annotated[int, _BYTE_ORDER] = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks the writer for ``num_tokens`` tokens of a known pattern, to prove and measure a path."""

    kind: ClassVar[Kind] = Kind.PROBE
    sequence_id: Annotated[str, _SEQUENCE_ID]
    generation: Annotated[int, _U32]
    num_tokens: Annotated[int, UInt(MAX_TOKENS, 1)]
    carrier: Annotated[str, _OPTIONAL_CARRIER] = ""
    block_table: Annotated[list[int], _BLOCK_TABLE] = field(default_factory=list)
    keys: Annotated[list[int], _KEYS] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefillWorker:
    """Where decode may ask for a prefill; the router made the list from its own registry."""

    instance_id: Annotated[str, _INSTANCE_ID]
    host: Annotated[str, _HOST]
    port: Annotated[int, _PORT]


@dataclass(frozen=True, slots=True)
class Generate:
    """The router hands a sequence to decode.

    ``tokens`` are the prompt followed by output already emitted elsewhere; ``num_prompt_tokens``
    says where the prompt ends. ``max_output_tokens`` counts the whole output, emitted part
    included. ``top_k`` 0 means off. With ``kv_from_sender`` decode asks the sender itself for the
    KV, by PREFILL on the same connection.
    """

    kind: ClassVar[Kind] = Kind.GENERATE
    sequence_id: Annotated[str, _SEQUENCE_ID]
    tokens: Annotated[list[int], _PROMPT]
    num_prompt_tokens: Annotated[int, UInt(MAX_TOKENS, 1)]
    max_output_tokens: Annotated[int, UInt(MAX_TOKENS, 1)]
    temperature: Annotated[float, Real(100.0)]
    top_p: Annotated[float, Real(1.0)]
    top_k: Annotated[int, _U32]
    seed: Annotated[int, _U64]
    stop_token_ids: Annotated[list[int], PackedUInts(32, 64)]
    ignore_eos: Annotated[bool, Boolean()]
    prefill_workers: Annotated[list[PrefillWorker], RecordList(MAX_PREFILL_WORKERS, PrefillWorker)]
    timeout_s: Annotated[float, _SECONDS]
    kv_from_sender: Annotated[bool, Boolean()] = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """Decode took ownership of the sequence."""

    kind: ClassVar[Kind] = Kind.ACCEPTED
    sequence_id: Annotated[str, _SEQUENCE_ID]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens; ``first_index`` counts from 0 over the whole output."""

    kind: ClassVar[Kind] = Kind.TOKENS
    sequence_id: Annotated[str, _SEQUENCE_ID]
    first_index: Annotated[int, _TOKEN_COUNT]
    tokens: Annotated[list[int], _PROMPT]


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence ended. ``code`` is 0 unless the reason is "abort" or "error"."""

    kind: ClassVar[Kind] = Kind.FINISHED
    sequence_id: Annotated[str, _SEQUENCE_ID]
    reason: Annotated[str, Choice(("stop", "length", "abort", "error"))]
    code: Annotated[int, _U32] = 0
    message: Annotated[str, _SENTENCE] = ""
    timings: Annotated[dict[str, float | int | str], ScalarMap(32, allow_float=True)] = field(
        default_factory=dict
    )


Message = (
    Hello
    | Auth
    | Error
    | Ping
    | Pong
    | Register
    | Registered
    | Renew
    | Describe
    | Description
    | Prefill
    | Started
    | Write
    | Commit
    | CommitAck
    | Abort
    | AbortAck
    | Placed
    | Heartbeat
    | Offer
    | Attached
    | Probe
    | Generate
    | Accepted
    | Tokens
    | Finished
)

MESSAGES: Final[Mapping[Kind, type[Message]]] = MappingProxyType(
    {message.kind: message for message in Message.__args__}
)
_ANY: Final = frozenset(ROLES)
_WORKERS: Final = frozenset({"prefill", "decode"})
# A raw client may bring the KV itself, so it writes as a prefill worker does.
_WRITERS: Final = frozenset({"prefill", "client"})
_READERS: Final = frozenset({"decode", "client"})
# Who may send what. A raw client may ask a worker for a prefill or a whole generation. Kinds that
# are missing here lie in files and mapped regions, never on a connection.
SENDERS: Final[Mapping[Kind, frozenset[str]]] = MappingProxyType(
    {
        Kind.HELLO: _ANY,
        Kind.AUTH: _ANY,
        Kind.ERROR: _ANY,
        Kind.PING: _ANY,
        Kind.PONG: _ANY,
        Kind.REGISTER: _WORKERS,
        Kind.REGISTERED: frozenset({"router"}),
        Kind.RENEW: _WORKERS,
        Kind.DESCRIBE: _READERS,
        Kind.DESCRIPTION: _WORKERS,
        Kind.PREFILL: _READERS,
        Kind.STARTED: _WRITERS,
        Kind.WRITE: _WRITERS,
        Kind.COMMIT: _WRITERS,
        Kind.COMMIT_ACK: _READERS,
        Kind.ABORT: _ANY,
        Kind.ABORT_ACK: _ANY,
        Kind.PLACED: _WRITERS,
        Kind.HEARTBEAT: _WRITERS,
        Kind.OFFER: _READERS,
        Kind.ATTACHED: _WRITERS,
        Kind.PROBE: _READERS,
        Kind.GENERATE: frozenset({"router", "client"}),
        Kind.ACCEPTED: frozenset({"decode", "router"}),
        Kind.TOKENS: frozenset({"decode", "router"}),
        Kind.FINISHED: frozenset({"decode", "router"}),
    }
)


FIELDS: Final[Mapping[type[Message], tuple[FieldInfo, ...]]] = MappingProxyType(
    {record: field_infos(record) for record in MESSAGES.values()}
)


def encode_fields(message: Message, order: ByteOrder) -> dict[str, Any]:
    """Fields of ``message`` as msgpack carries them; packed lists are in ``order``.

    LocalProtocolError names the first field that breaks its limit.
    """
    try:
        return encode_record(message, FIELDS[type(message)], order)
    except FieldError as exc:
        raise LocalProtocolError(f"cannot send {message.kind.name}: {exc}") from exc


def decode_fields(kind: Kind, fields: Mapping[str, Any], order: ByteOrder) -> Message:
    """Message of ``kind`` out of a decoded descriptor.

    UnexpectedMessage if ``kind`` belongs in a file. Malformed names the first field, in declared
    order, that is missing or breaks its limit; then any unknown field whose name starts with "!".
    Other unknown fields are skipped.
    """
    record = MESSAGES.get(kind)
    if record is None:
        raise UnexpectedMessage(f"a {kind.name} frame belongs in a file, not on a connection")
    return record(**decode_record(FIELDS[record], fields, order))
