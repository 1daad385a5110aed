"""Random walks over two connections, and over leases and blocks, each beside a simple model.

The model says what may happen next; the real thing must do exactly that, whatever the order of
the steps, the size of the reads and the damage on the way.
"""

import itertools
import os
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

from kvproto.blocks import BlockPool
from kvproto.connection import Connection
from kvproto.convert import RowConverter
from kvproto.description import layer_records
from kvproto.errors import (
    ConnectionLost,
    DigestMismatch,
    ErrorCode,
    KvProtoError,
    LeaseError,
    LocalProtocolError,
    Malformed,
    PeerError,
    PoolExhausted,
    RemoteProtocolError,
)
from kvproto.events import HandshakeDone, MessageReceived, WriteRefused
from kvproto.geometry import PER_SEQUENCE, KvGeometry, Layer, PoolLayout, Region
from kvproto.handshake import Identity
from kvproto.header import ByteOrder
from kvproto.lease import LeaseTable, Part
from kvproto.messages import (
    SENDERS,
    Abort,
    AbortAck,
    Attached,
    Commit,
    CommitAck,
    Describe,
    Description,
    Error,
    Heartbeat,
    Message,
    Offer,
    Ping,
    Placed,
    Prefill,
    Probe,
    Started,
    Tokens,
    Write,
)
from kvproto.state import BlockState, ConnectionState

IS_LONG = os.environ.get("PD_LONG_TESTS") == "1"
WALKS = settings(
    max_examples=1000 if IS_LONG else 120,
    stateful_step_count=60 if IS_LONG else 40,
    deadline=None,
    derandomize=not IS_LONG,
)
pytestmark = pytest.mark.timeout(900 if IS_LONG else 60)
SMALL = KvGeometry.uniform(2, 1, 2, "float16", ("a", "b"))
SEQUENCES = ("s", "t", "refused")

_names = st.sampled_from(SEQUENCES)
_generations = st.integers(1, 3)
_tokens = st.lists(st.integers(0, 9), min_size=1, max_size=5)
messages = st.one_of(
    st.builds(Ping, st.integers(0, 9)),
    st.builds(Started, _names, _generations, st.just(0.5)),
    st.builds(Prefill, _names, _generations, _tokens, st.just(1.0)),
    st.builds(Commit, _names, _generations, st.just(2), st.just(8), _tokens, *[st.just(0.0)] * 3),
    st.builds(CommitAck, _names, _generations),
    st.builds(Abort, _names, st.integers(0, 3), st.just(9), st.text(max_size=5)),
    st.builds(AbortAck, _names, _generations),
    st.builds(Tokens, _names, st.just(0), _tokens),
    st.builds(Error, st.integers(1, 23), st.just("words"), st.just(""), _names),
    st.builds(Placed, _names, _generations, st.just("a"), st.just(0), st.integers(1, 9)),
    st.builds(Heartbeat, _names, _generations),
    st.builds(Probe, _names, _generations, st.integers(1, 9), st.just("mapped"), _tokens),
    st.sampled_from(
        [
            Describe(),
            Description("model", 9, SMALL.dtype, layer_records(SMALL)),
            Offer("mapped", b"n" * 32),
            Attached("mapped", b"n" * 32, "out of reach"),
        ]
    ),
)


# -- two connections -------------------------------------------------------------------------------


class ModelLanding:
    """One buffer for whatever is being received; refuses the sequence "refused"."""

    def __init__(self) -> None:
        self.geometry = SMALL
        self.memory = bytearray(4096)
        self.num_open = 0
        self.shown = bytearray()
        self.num_body_nbytes = 0
        self.bodies: deque[tuple[bytes, ByteOrder]] = deque()

    def destination(
        self, write: Write, body_nbytes: int, shape_word: int, writer: str
    ) -> list[memoryview]:
        assert self.num_open == 0, "two bodies at once"
        assert writer == "p-1"
        if write.sequence_id == "refused":
            raise LeaseError("no lease", sequence_id=write.sequence_id)
        if shape_word != self.geometry.shape_word(0, write.num_tokens):
            raise Malformed("shape_word", "is of something else")
        self.num_open = 1
        self.shown = bytearray()
        self.num_body_nbytes = body_nbytes
        half = body_nbytes // 2
        view = memoryview(self.memory)
        return [view[:half], view[half:body_nbytes]]

    def received(self, write: Write, piece: memoryview) -> None:
        assert self.num_open == 1
        self.shown += piece

    def landed(self, write: Write, order: ByteOrder) -> None:
        self.num_open -= 1
        body = bytes(self.memory[: self.num_body_nbytes])
        assert self.shown == body, "what is in place is not what was shown"
        self.bodies.append((body, order))

    def abandoned(self, write: Write) -> None:
        self.num_open -= 1

    def placed(self, placed: Placed, writer: str) -> None:
        assert writer == "p-1"
        if placed.sequence_id == "refused":
            raise LeaseError("no lease", sequence_id=placed.sequence_id)


@dataclass(eq=False)
class Side:
    """One connection, what it has told, and what the model knows about it.

    Attributes:
        expected: events that must come next, in order, unless the path is damaged.
        bodies: of the WRITEs among them, and whether their frame's check covers them.
        incoming: bytes on their way to this side.
        is_damaged: those bytes were changed or cut.
        is_over: ``Ended`` came, or we closed it.
    """

    connection: Connection
    landing: ModelLanding | None
    expected: deque[Message] = field(default_factory=deque)
    bodies: deque[tuple[bytes, bool]] = field(default_factory=deque)
    incoming: bytearray = field(default_factory=bytearray)
    is_damaged: bool = False
    has_eof: bool = False
    is_ready: bool = False
    is_over: bool = False
    last_refused: tuple[str, int] | None = None


class ConnectionMachine(RuleBasedStateMachine):
    """Two sides, every byte between them under control."""

    @initialize(
        orders=st.tuples(st.sampled_from(ByteOrder), st.sampled_from(ByteOrder)),
        secrets=st.sampled_from([(b"k" * 16, b"k" * 16)] * 4 + [(None, None), (b"k" * 16, None)]),
        has_met=st.sampled_from([True, True, True, True, False]),
        num_quiet_steps=st.integers(10, 40),
    )
    def connect(self, orders, secrets, has_met, num_quiet_steps):
        # Otherwise most walks would end before anything was said.
        self.num_quiet_steps = num_quiet_steps
        self.can_agree = secrets[0] == secrets[1]
        identities = [
            Identity(role, name, SMALL.facts(), byte_order=order, secret=secret)
            for role, name, order, secret in zip(
                ("decode", "prefill"), ("d-1", "p-1"), orders, secrets, strict=True
            )
        ]
        landing = ModelLanding()
        self.orders = orders
        self.roles = ("decode", "prefill")
        dialling = Connection(identities[0], nonce=b"d" * 32, is_server=False, landing=landing)
        accepting = Connection(identities[1], nonce=b"p" * 32, is_server=True)
        self.sides = (Side(dialling, landing), Side(accepting, None))
        self.random = random.Random(1)
        self.flush()
        if has_met:
            for index in (0, 1, 0, 1):
                self.deliver(index, 1 << 20, True)

    def is_time_for_faults(self):
        return self.num_quiet_steps <= 0

    @invariant()
    def time_goes_on(self):
        self.num_quiet_steps = getattr(self, "num_quiet_steps", 0) - 1

    def flush(self):
        """What each side has to say is on its way to the other."""
        for index, side in enumerate(self.sides):
            data = b"".join(side.connection.data_to_send())
            if not self.sides[1 - index].has_eof:
                self.sides[1 - index].incoming += data

    def send(self, index, message, body=(), **how):
        """Send, and check the model's word on whether that is allowed."""
        side, other = self.sides[index], self.sides[1 - index]
        is_allowed = (
            side.connection.state is ConnectionState.READY
            and self.roles[index] in SENDERS[message.kind]
        )
        if not is_allowed:
            with pytest.raises(LocalProtocolError):
                side.connection.send(message, body, **how)
            assert side.connection.data_to_send() == []
            return False
        side.connection.send(message, body, **how)
        if not isinstance(message, Ping):
            other.expected.append(message)
        self.flush()
        return True

    @rule(index=st.integers(0, 1), message=messages)
    def send_message(self, index, message):
        # Whoever may send it does.
        is_mine = self.roles[index] in SENDERS[message.kind]
        self.send(index if is_mine else 1 - index, message)

    @rule(index=st.integers(0, 1), message=messages)
    def send_what_may_be_forbidden(self, index, message):
        self.send(index, message)

    @rule(
        index=st.sampled_from([1, 1, 1, 0]),
        sequence_id=st.sampled_from(SEQUENCES),
        num_tokens=st.integers(1, 40),
        is_body_checked=st.booleans(),
    )
    def send_write(self, index, sequence_id, num_tokens, is_body_checked):
        body = self.random.randbytes(SMALL.write_nbytes(0, num_tokens))
        write = Write(sequence_id, 1, "a", 0, num_tokens)
        word = SMALL.shape_word(0, num_tokens)
        is_sent = self.send(index, write, [body], shape_word=word, is_body_checked=is_body_checked)
        if is_sent and sequence_id != "refused":
            self.sides[1 - index].bodies.append((body, is_body_checked))

    @rule(
        index=st.integers(0, 1),
        nbytes=st.integers(1, 400),
        is_all=st.sampled_from([True, True, False]),
        is_short=st.booleans(),
    )
    def deliver(self, index, nbytes, is_all, is_short=False):
        side = self.sides[index]
        if side.is_over:
            # What still arrives is dropped without a word.
            size = min(nbytes, side.connection.next_buffer().nbytes)
            assert side.connection.bytes_received(size) == []
            return
        left = len(side.incoming) if is_all else min(nbytes, len(side.incoming))
        while left and not side.is_over:
            buffer = side.connection.next_buffer()
            size = min(left, buffer.nbytes, nbytes)
            buffer[:size] = side.incoming[:size]
            del side.incoming[:size]
            left -= size
            missing_nbytes = side.connection.missing_nbytes
            if is_short and side.connection.middle_received(size):
                # The short way is only for bytes of a body of which more must come.
                assert side.connection.missing_nbytes == missing_nbytes - size > 0
                assert side.connection.data_to_send() == []
                continue
            self.take(index, side.connection.bytes_received(size))
            self.flush()
        if side.has_eof and not side.incoming and not side.is_over:
            self.take(index, side.connection.eof_received())

    def take(self, index, events):
        """Compare what a side tells with what the model expects."""
        side, other = self.sides[index], self.sides[1 - index]
        for event in events:
            assert not side.is_over, "an event after the last"
            if isinstance(event, HandshakeDone):
                assert not side.is_ready
                assert self.can_agree
                side.is_ready = True
            elif isinstance(event, MessageReceived):
                assert side.is_ready
                if isinstance(event.message, Error) and not event.message.sequence_id:
                    continue  # the peer's last words
                assert event.message == side.expected.popleft()
                if isinstance(event.message, Write):
                    body, order = side.landing.bodies.popleft()
                    sent, is_body_checked = side.bodies.popleft()
                    assert order is self.orders[1 - index]
                    # A body under the digests alone may be damaged without notice here.
                    assert body == sent or (side.is_damaged and not is_body_checked)
            elif isinstance(event, WriteRefused):
                assert event.write == side.expected.popleft()
                assert event.write.sequence_id == "refused"
                transfer = (event.write.sequence_id, event.write.generation)
                if transfer != side.last_refused:
                    side.last_refused = transfer
                    words = str(event.error)
                    other.expected.append(
                        Error(ErrorCode.LEASE, words, "generation", event.write.sequence_id)
                    )
            else:
                self.ended(side, other, event)

    def ended(self, side, other, event):
        side.is_over = True
        error = event.error
        assert isinstance(error, KvProtoError)
        is_sound = not side.is_damaged and not side.has_eof
        if is_sound and self.can_agree:
            # Nothing was wrong here: the peer must have found something, and said so.
            assert other.is_over
            assert isinstance(error, PeerError)
        if isinstance(error, ConnectionLost) and error.clean:
            assert side.has_eof
            assert side.is_ready
        if isinstance(error, RemoteProtocolError):
            assert side.is_damaged or side.has_eof
            assert side.connection.state in {ConnectionState.POISONED, ConnectionState.ENDED}
        if side.landing is not None:
            assert side.landing.num_open == 0

    @precondition(is_time_for_faults)
    @rule(index=st.integers(0, 1), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip(self, index, place, bit):
        side = self.sides[index]
        if side.incoming and not side.is_damaged:
            side.is_damaged = True
            side.incoming[int(place * len(side.incoming))] ^= 1 << bit

    @precondition(is_time_for_faults)
    @rule(index=st.integers(0, 1), place=st.floats(0, 1), is_cut=st.booleans())
    def end_of_stream(self, index, place, is_cut):
        """The peer's bytes end; some of what it said may be lost with it."""
        side = self.sides[index]
        side.has_eof = True
        if is_cut:
            del side.incoming[int(place * len(side.incoming)) :]
            side.is_damaged = True

    @precondition(is_time_for_faults)
    @rule(index=st.integers(0, 1))
    def close(self, index):
        side, other = self.sides[index], self.sides[1 - index]
        side.connection.close()
        side.is_over = True
        other.has_eof = True
        assert side.connection.state in {ConnectionState.ENDED, ConnectionState.POISONED}

    @invariant()
    def a_side_that_is_over_says_nothing(self):
        for side in getattr(self, "sides", ()):
            if side.is_over:
                assert side.connection.eof_received() == []
                assert side.connection.data_to_send() == []
                assert side.landing is None or side.landing.num_open == 0

    @invariant()
    def the_state_is_the_models(self):
        for side in getattr(self, "sides", ()):
            is_ready = side.connection.state is ConnectionState.READY
            assert is_ready is (side.is_ready and not side.is_over)

    def teardown(self):
        """Deliver the rest: on a sound path everything that was sent has arrived."""
        if not hasattr(self, "sides"):
            return
        is_sound = self.can_agree and not any(
            side.is_damaged or side.has_eof or side.is_over for side in self.sides
        )
        for _ in range(4):
            for index in (0, 1):
                self.deliver(index, 1 << 20, True)
        if is_sound:
            for side in self.sides:
                assert side.is_ready
                assert not side.expected
                assert not side.bodies
                assert not side.is_over
        elif not self.can_agree and not any(side.has_eof for side in self.sides):
            assert all(side.is_over and not side.is_ready for side in self.sides)


TestConnectionMachine = ConnectionMachine.TestCase
TestConnectionMachine.settings = WALKS


# -- leases and blocks -----------------------------------------------------------------------------

BLOCK_SIZE = 4
NUM_BLOCKS = 10
MAX_QUARANTINED_BLOCKS = 4
# A window, a state for each sequence, and two heads everywhere, for two writers to share.
MIXED = KvGeometry(
    (
        Layer("a", (Region("k", 2, 2), Region("v", 2, 3)), 3),
        Layer("b", (Region("k", 2, 2), Region("state", 2, 1, PER_SEQUENCE))),
        Layer("c", (Region("state", 2, 2, PER_SEQUENCE),)),
    ),
    "float16",
)


@dataclass(eq=False)
class ModelGrant:
    """What the model knows about the blocks of one handoff.

    Attributes:
        generations: of its parts, those that were committed included.
        parts: the leases that have not ended.
    """

    sequence_id: str
    table: list[int]
    num_tokens: int
    generations: list[int]
    parts: dict[int, "ModelLease"] = field(default_factory=dict)
    is_quarantined: bool = False


@dataclass(eq=False)
class ModelLease:
    """What the model knows about one lease.

    Attributes:
        geometry: what its writer sends.
        next_tokens: by layer.
        num_nbytes: that have landed.
        open: layers half received, with the write and the memory the writer still holds.
    """

    grant: ModelGrant
    generation: int
    writer: str
    geometry: KvGeometry
    is_placed: bool
    is_checked: bool
    next_tokens: list[int]
    num_nbytes: int = 0
    is_revoked: bool = False
    open: dict[int, tuple[Write, list[memoryview]]] = field(default_factory=dict)

    @property
    def value(self) -> int:
        """The byte its writer writes."""
        return value_of(self.generation)

    @property
    def is_whole(self) -> bool:
        """Every token has landed."""
        return set(self.next_tokens) == {self.grant.num_tokens}

    def commit(self) -> Commit:
        """The true one, out of nothing but what a writer knows."""
        num_tokens = self.grant.num_tokens
        digests, nbytes = [], 0
        for layer in self.geometry.layers:
            for region in layer.regions:
                num_rows = num_tokens - layer.first_needed_token(num_tokens)
                if region.per == PER_SEQUENCE:
                    num_rows = 1
                row_nbytes = region.num_heads * region.head_dim * 2
                digests.append(xxh3_64_intdigest(bytes([self.value]) * row_nbytes * num_rows))
                nbytes += row_nbytes * num_rows
        return Commit(
            self.grant.sequence_id, self.generation, num_tokens, nbytes, digests, 0.0, 0.0, 0.0
        )


def value_of(number: int) -> int:
    return number % 250 + 1


@dataclass(frozen=True)
class Contents:
    """What an owner has put into its blocks: the bytes of equal shares of the heads."""

    blocks: list[int]
    num_tokens: int
    values: tuple[int, ...]


class LeaseMachine(RuleBasedStateMachine):
    """Two writers, blocks of three kinds of owner, and the model's word on every call.

    ``geometry`` is a class attribute: machines for other geometries are subclasses. All regions
    have two heads, of 2 bytes each element.
    """

    geometry: ClassVar[KvGeometry] = MIXED

    def __init__(self):
        super().__init__()
        self.layout = PoolLayout(self.geometry, NUM_BLOCKS, BLOCK_SIZE)
        self.pool = memoryview(bytearray(self.layout.nbytes))
        self.blocks = BlockPool(NUM_BLOCKS)
        self.table = LeaseTable(
            self.layout,
            self.pool,
            self.blocks,
            converter=RowConverter(),
            max_quarantined_blocks=MAX_QUARANTINED_BLOCKS,
        )
        self.numbers = itertools.count(1)
        self.leases: dict[int, ModelLease] = {}
        # Block to (state, owner, generation), for each block that is not free.
        self.owned: dict[int, tuple[BlockState, str, int]] = {}
        self.contents: dict[str, Contents] = {}

    @property
    def layers(self):
        return range(self.geometry.num_layers)

    def pick(self, data, items):
        """Any of these, or None if there is none."""
        keys = sorted(items)
        return data.draw(st.sampled_from(keys)) if keys else None

    def own(self, blocks, state, owner="", generation=0):
        for block in blocks:
            if state is BlockState.FREE:
                del self.owned[block]
            else:
                self.owned[block] = (state, owner, generation)

    def allocate(self, owner, num_blocks):
        """Blocks, or None if the pool has too few; never one that somebody has."""
        try:
            blocks = self.blocks.allocate(owner, num_blocks)
        except PoolExhausted:
            assert num_blocks > NUM_BLOCKS - len(self.owned)
            return None
        assert len(set(blocks)) == num_blocks
        assert not set(blocks) & self.owned.keys()
        self.own(blocks, BlockState.RESERVED, owner)
        return blocks

    @rule(num_blocks=st.integers(1, 4))
    def fill_here(self, num_blocks):
        """A sequence whose KV this side computes itself: no lease."""
        number = next(self.numbers)
        owner = f"own{number}"
        blocks = self.allocate(owner, num_blocks)
        if blocks is None:
            return
        contents = Contents(blocks, num_blocks * BLOCK_SIZE, (value_of(number),))
        for region, start, nbytes in self.spans(contents):
            self.pool[start : start + nbytes] = self.rows(region, nbytes, contents)
        self.blocks.commit(blocks, owner)
        self.own(blocks, BlockState.COMMITTED, owner)
        self.contents[owner] = contents

    def spans(self, contents):
        """Region, start and size of each piece of memory that holds needed rows."""
        for index, layer in enumerate(self.geometry.layers):
            first = layer.first_needed_token(contents.num_tokens)
            num_tokens = contents.num_tokens - first
            pieces = self.layout.pieces(index, contents.blocks, first, num_tokens, is_last=True)
            for region, spans in zip(layer.regions, pieces, strict=True):
                for start, nbytes in spans:
                    yield region, start, nbytes

    def rows(self, region, nbytes, contents):
        """The bytes of rows, of which each share of the heads has a value of its own."""
        row_nbytes = self.geometry.row_nbytes(region)
        share_nbytes = row_nbytes // len(contents.values)
        row = b"".join(bytes([value]) * share_nbytes for value in contents.values)
        return row * (nbytes // row_nbytes)

    @initialize(number=st.integers(1, 3))
    def begin_with_leases(self, number):
        for index in range(number):
            writers = (("p", "q"), ("p",), ("",))[index]
            self.grant(5 - index, 0, writers, index == 1, True)

    @rule(
        num_tokens=st.integers(1, 3 * BLOCK_SIZE),
        num_spare_blocks=st.sampled_from([0, 0, 1]),
        writers=st.sampled_from([("",), ("p",), ("q",), ("p", "q"), ("p", "p")]),
        is_placed=st.sampled_from([False, False, True]),
        is_checked=st.sampled_from([True, True, False]),
    )
    def grant_more(self, num_tokens, num_spare_blocks, writers, is_placed, is_checked):
        self.grant(num_tokens, num_spare_blocks, writers, is_placed, is_checked)

    def grant(self, num_tokens, num_spare_blocks, writers, is_placed, is_checked):
        generations = [next(self.numbers) for _ in writers]
        sequence_id = f"s{generations[0]}"
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        blocks = self.allocate(sequence_id, num_blocks + num_spare_blocks)
        if blocks is None:
            return
        is_shared = len(writers) > 1
        is_placed = is_placed and not is_shared
        sent = self.geometry.as_wire(num_heads=1) if is_shared else self.geometry
        parts = [
            Part(
                generation,
                writer,
                wire=sent if is_shared else None,
                first_head=head,
                is_placed=is_placed,
                is_checked=is_checked,
            )
            for head, (generation, writer) in enumerate(zip(generations, writers, strict=True))
        ]
        if self.num_quarantined_blocks() > MAX_QUARANTINED_BLOCKS:
            with pytest.raises(PoolExhausted):
                self.table.grant_parts(sequence_id, parts, blocks, num_tokens)
            self.blocks.free(blocks, sequence_id)
            self.own(blocks, BlockState.FREE)
            return
        if is_shared:
            # Half of the heads is not all, and no carrier can place them.
            for wrong in (parts[:1], [replace(part, is_placed=True) for part in parts]):
                with pytest.raises(LocalProtocolError):
                    self.table.grant_parts(sequence_id, wrong, blocks, num_tokens)
        self.table.grant_parts(sequence_id, parts, blocks, num_tokens)
        grant = ModelGrant(sequence_id, blocks[:num_blocks], num_tokens, generations)
        self.own(grant.table, BlockState.WRITABLE, sequence_id, generations[0])
        first_tokens = [layer.first_needed_token(num_tokens) for layer in self.geometry.layers]
        for generation, writer in zip(generations, writers, strict=True):
            self.leases[generation] = grant.parts[generation] = ModelLease(
                grant, generation, writer, sent, is_placed, is_checked, list(first_tokens)
            )
        if num_spare_blocks:
            self.contents[f"{sequence_id} spare"] = Contents(blocks[num_blocks:], 0, ())

    def num_quarantined_blocks(self):
        """Blocks of grants that were revoked; each once, whatever the number of its parts."""
        grants = {id(lease.grant): lease.grant for lease in self.leases.values()}.values()
        return sum(len(grant.table) for grant in grants if grant.is_quarantined)

    def next_write(self, lease, layer, num_tokens):
        """The next tokens of a layer, and the sizes that go with them; None after the last."""
        first = lease.next_tokens[layer]
        num_tokens = min(num_tokens, lease.grant.num_tokens - first)
        if not num_tokens:
            return None
        name = self.geometry.layer_names[layer]
        write = Write(lease.grant.sequence_id, lease.generation, name, first, num_tokens)
        is_last = first + num_tokens == lease.grant.num_tokens
        nbytes = lease.geometry.write_nbytes(layer, num_tokens, is_last=is_last)
        return write, nbytes, lease.geometry.shape_word(layer, num_tokens)

    @rule(
        data=st.data(),
        num_tokens=st.integers(1, NUM_BLOCKS * BLOCK_SIZE),
        is_all=st.sampled_from([True, True, False]),
    )
    def begin_write(self, data, num_tokens, is_all):
        """The next tokens of layers; refused only if the lease is over or the layer busy."""
        written = [number for number, lease in self.leases.items() if not lease.is_placed]
        generation = self.pick(data, written)
        if generation is None:
            return
        layers = self.layers if is_all else [data.draw(st.sampled_from(self.layers))]
        self.begin(self.leases[generation], layers, num_tokens)

    def begin(self, lease, layers, num_tokens):
        for layer in layers:
            next_write = self.next_write(lease, layer, num_tokens)
            if next_write is None:
                continue
            write, nbytes, word = next_write
            writer = lease.writer or "anybody"
            if lease.grant.is_quarantined or layer in lease.open:
                with pytest.raises(LeaseError):
                    self.table.destination(write, nbytes, word, writer)
                continue
            pieces = self.table.destination(write, nbytes, word, writer)
            assert sum(piece.nbytes for piece in pieces) == nbytes
            lease.open[layer] = (write, pieces)

    @rule(data=st.data(), num_tokens=st.integers(1, NUM_BLOCKS * BLOCK_SIZE))
    def place(self, data, num_tokens):
        """A carrier puts the next tokens of every layer into the pool, then says so."""
        placed = [number for number, lease in self.leases.items() if lease.is_placed]
        generation = self.pick(data, placed)
        if generation is not None:
            self.place_now(self.leases[generation], num_tokens)

    def place_now(self, lease, num_tokens):
        for layer in self.layers:
            next_write = self.next_write(lease, layer, num_tokens)
            if next_write is None:
                continue
            write, nbytes, _ = next_write
            is_last = write.first_token + write.num_tokens == lease.grant.num_tokens
            # Revoked or not: a carrier writes until there is proof that it ended.
            for spans in self.layout.pieces(
                layer, lease.grant.table, write.first_token, write.num_tokens, is_last=is_last
            ):
                for start, size in spans:
                    self.pool[start : start + size] = bytes([lease.value]) * size
            message = as_placed(write)
            if lease.grant.is_quarantined:
                with pytest.raises(LeaseError):
                    self.table.placed(message, lease.writer)
                continue
            self.table.placed(message, lease.writer)
            lease.next_tokens[layer] += write.num_tokens
            lease.num_nbytes += nbytes

    @rule(data=st.data(), fault=st.integers(0, 9), amount=st.integers(1, 3))
    def begin_wrong_write(self, data, fault, amount):
        """One thing is wrong with it, whatever the state of the lease."""
        generation = self.pick(data, self.leases)
        if generation is None:
            return
        lease = self.leases[generation]
        layer = data.draw(st.sampled_from(self.layers))
        first = lease.next_tokens[layer]
        name = self.geometry.layer_names[layer]
        write = Write(lease.grant.sequence_id, generation, name, first, 1)
        is_last = first + 1 == lease.grant.num_tokens
        nbytes = lease.geometry.write_nbytes(layer, 1, is_last=is_last)
        word = lease.geometry.shape_word(layer, 1)
        writer, is_placed = lease.writer, lease.is_placed
        refusal = LeaseError
        if fault == 0:
            write = replace(write, sequence_id="unknown")
        elif fault == 1:
            write = replace(write, generation=777_777)
        elif fault == 2 and lease.writer:
            writer = "thief"
        elif fault == 3:
            write = replace(write, layer="unknown")
        elif fault == 4 and first:
            write = replace(write, first_token=first - min(amount, first))
        elif fault == 5:
            write = replace(write, first_token=first + amount)
        elif fault == 6:
            is_placed = not is_placed
        elif fault == 7 and not is_placed:
            nbytes += amount
        elif fault == 8 and not is_placed:
            word ^= amount
            is_right = not lease.grant.is_quarantined and layer not in lease.open
            if is_right and first < lease.grant.num_tokens:
                refusal = Malformed
        else:
            write = replace(write, num_tokens=lease.grant.num_tokens - first + amount)
        before = bytes(self.pool)
        if is_placed:
            with pytest.raises(refusal):
                self.table.placed(as_placed(write), writer)
        else:
            with pytest.raises(refusal):
                self.table.destination(write, nbytes, word, writer)
        assert self.pool == before

    @rule(data=st.data())
    def scribble(self, data):
        """A slow writer goes on, revoked or not."""
        generation = self.pick(data, [g for g, lease in self.leases.items() if lease.open])
        if generation is not None:
            for _, pieces in self.leases[generation].open.values():
                for piece in pieces:
                    piece[:] = bytes([self.leases[generation].value]) * piece.nbytes

    @rule(
        data=st.data(),
        is_complete=st.sampled_from([True, True, True, False]),
        is_all=st.booleans(),
        cut=st.integers(0, 50),
        order=st.sampled_from(ByteOrder),
    )
    def end_write(self, data, is_complete, is_all, cut, order):
        generation = self.pick(data, [g for g, lease in self.leases.items() if lease.open])
        if generation is None:
            return
        lease = self.leases[generation]
        layers = sorted(lease.open)
        layers = layers if is_all else [data.draw(st.sampled_from(layers))]
        self.end(lease, layers, is_complete, cut, order)

    def end(self, lease, layers, is_complete=True, cut=7, order=ByteOrder.BIG):
        for layer in layers:
            write, pieces = lease.open.pop(layer)
            for piece in pieces:
                piece[:] = bytes([lease.value]) * piece.nbytes
                for part in (piece[:cut], piece[cut:]):
                    if part.nbytes:
                        self.table.received(write, part)
            if not is_complete:
                self.table.abandoned(write)
                continue
            self.table.landed(write, order)
            if not lease.grant.is_quarantined:
                lease.next_tokens[layer] += write.num_tokens
                lease.num_nbytes += sum(piece.nbytes for piece in pieces)

    @rule(data=st.data(), num_tokens=st.integers(1, 2 * BLOCK_SIZE), is_committed=st.booleans())
    def complete(self, data, num_tokens, is_committed):
        """Everything that a lease still lacks; a walk of single steps would rarely come here."""
        sound = [number for number, lease in self.leases.items() if not lease.grant.is_quarantined]
        generation = self.pick(data, sound)
        if generation is None:
            return
        lease = self.leases[generation]
        while not lease.is_whole:
            if lease.is_placed:
                self.place_now(lease, num_tokens)
            else:
                self.end(lease, sorted(lease.open))
                self.begin(lease, self.layers, num_tokens)
                self.end(lease, sorted(lease.open))
        if is_committed:
            self.commit_now(lease)

    def revoke_now(self, lease):
        assert self.table.revoke(lease.generation) == lease.grant.table
        lease.is_revoked = lease.grant.is_quarantined = True
        first = lease.grant.generations[0]
        self.own(lease.grant.table, BlockState.QUARANTINED, lease.grant.sequence_id, first)

    def release_now(self, lease):
        """Blocks come back with the last part only."""
        del lease.grant.parts[lease.generation], self.leases[lease.generation]
        is_last = not lease.grant.parts
        freed = lease.grant.table if is_last else []
        assert self.table.release(lease.generation) == freed
        assert self.table.release(lease.generation) == []
        if is_last:
            self.own(freed, BlockState.FREE)

    @rule(data=st.data())
    def revoke(self, data):
        busy = [number for number, lease in self.leases.items() if lease.open]
        generation = self.pick(data, busy or self.leases)
        if generation is None:
            assert self.table.revoke(999_999) == []
            return
        self.revoke_now(self.leases[generation])

    @rule(data=st.data())
    def release(self, data):
        revoked = [number for number, lease in self.leases.items() if lease.is_revoked]
        generation = self.pick(data, revoked or self.leases)
        if generation is None:
            assert self.table.release(999_999) == []
            return
        lease = self.leases[generation]
        assert self.table.quiesced(generation) is not bool(lease.open)
        if lease.open or not lease.is_revoked:
            with pytest.raises(LocalProtocolError):
                self.table.release(generation)
            return
        self.release_now(lease)

    @rule(writer=st.sampled_from(["p", "q", "nobody", "nobody", "nobody", "nobody"]))
    def a_writer_dies(self, writer):
        """Its connection ends: half-received writes are given up, its leases end."""
        for lease in list(self.leases.values()):
            if lease.writer != writer:
                continue
            for write, _ in lease.open.values():
                self.table.abandoned(write)
            self.revoke_now(lease)
            self.release_now(lease)

    @rule(data=st.data(), lie=st.sampled_from(["", "", "", "nbytes", "num_tokens", "digests"]))
    def commit(self, data, lie):
        whole = [number for number, lease in self.leases.items() if lease.is_whole]
        generation = self.pick(data, whole or self.leases)
        if generation is not None:
            self.commit_now(self.leases[generation], lie)

    def commit_now(self, lease, lie=""):
        generation = lease.generation
        true = commit = lease.commit()
        is_over = lease.grant.is_quarantined
        if lie == "digests":
            commit = replace(commit, digests=[commit.digests[0] ^ 1, *commit.digests[1:]])
        elif lie:
            commit = replace(commit, **{lie: getattr(commit, lie) + 1})
        assert self.table.is_complete(commit) is (lease.num_nbytes >= commit.nbytes)
        is_lie = lie in {"nbytes", "num_tokens"} or (lie == "digests" and lease.is_checked)
        if not lease.is_whole or is_over or is_lie:
            is_damage = lease.is_whole and not is_over and lie == "digests"
            with pytest.raises(DigestMismatch if is_damage else LeaseError):
                self.table.commit(commit)
            return
        assert lease.num_nbytes == true.nbytes
        if not lease.is_checked:
            commit = replace(commit, digests=[])
        self.table.check(commit)
        grant = lease.grant
        del grant.parts[generation], self.leases[generation]
        assert self.table.commit(commit) is (not grant.parts)
        with pytest.raises(LeaseError):
            self.table.commit(commit)
        assert self.table.revoke(generation) == self.table.release(generation) == []
        if not grant.parts:
            self.own(grant.table, BlockState.COMMITTED, grant.sequence_id)
            values = tuple(value_of(number) for number in grant.generations)
            self.contents[grant.sequence_id] = Contents(grant.table, grant.num_tokens, values)

    @rule(data=st.data())
    def free(self, data):
        owner = self.pick(data, self.contents)
        if owner is not None:
            blocks = self.contents.pop(owner).blocks
            self.blocks.free(blocks, owner.split()[0])
            self.own(blocks, BlockState.FREE)

    @rule(data=st.data())
    def use_blocks_of_a_lease(self, data):
        """What a peer may still write is neither given back nor leased again."""
        generation = self.pick(data, self.leases)
        if generation is None:
            return
        grant = self.leases[generation].grant
        is_over_budget = self.num_quarantined_blocks() > MAX_QUARANTINED_BLOCKS
        refusal = PoolExhausted if is_over_budget else LocalProtocolError
        with pytest.raises(LocalProtocolError):
            self.blocks.free(grant.table, grant.sequence_id)
        with pytest.raises(refusal):
            self.table.grant("x", generation, grant.table, 1)
        with pytest.raises(refusal):
            self.table.grant(grant.sequence_id, 888_888, grant.table, 1)

    @invariant()
    def every_block_is_as_the_model_says(self):
        for block in range(NUM_BLOCKS):
            entry = self.blocks.block(block)
            state, owner, generation = self.owned.get(block, (BlockState.FREE, "", 0))
            assert (entry.state, entry.owner, entry.generation) == (state, owner, generation)

    @invariant()
    def the_counts_add_up(self):
        stats = self.blocks.stats()
        assert sum(stats.values()) == NUM_BLOCKS
        assert stats["free"] == self.blocks.num_free_blocks == NUM_BLOCKS - len(self.owned)
        leases = self.leases.values()
        for lease in leases:
            assert self.table.landed_nbytes(lease.generation) == lease.num_nbytes
        num_quarantined = self.num_quarantined_blocks()
        assert self.table.stats() == {
            "num_leases": len(leases),
            "num_revoked": sum(lease.is_revoked for lease in leases),
            "num_writing": sum(len(lease.open) for lease in leases),
            "num_quarantined_blocks": num_quarantined,
            "max_quarantined_blocks": MAX_QUARANTINED_BLOCKS,
        }
        assert stats["quarantined"] == num_quarantined
        assert self.table.is_over_budget is (num_quarantined > MAX_QUARANTINED_BLOCKS)

    @invariant()
    def no_block_is_in_two_hands(self):
        grants = {id(lease.grant): lease.grant for lease in self.leases.values()}.values()
        tables = [grant.table for grant in grants]
        tables += [contents.blocks for contents in self.contents.values()]
        listed = list(itertools.chain.from_iterable(tables))
        assert len(listed) == len(set(listed))
        assert set(listed) == self.owned.keys()

    @invariant()
    def what_is_complete_is_never_written(self):
        for contents in self.contents.values():
            if not contents.values:  # reserved only
                continue
            for region, start, nbytes in self.spans(contents):
                expected = self.rows(region, nbytes, contents)
                assert self.pool[start : start + nbytes] == expected


def as_placed(write: Write) -> Placed:
    """The same coordinates as PLACED."""
    return Placed(
        write.sequence_id, write.generation, write.layer, write.first_token, write.num_tokens
    )


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(WALKS, max_examples=1000 if IS_LONG else 250)
