"""Failures that other systems of this kind have had in public, and the test of ours for each.

The ids B01 to B40 number well-known bug reports and advisories about prefill/decode separation.
``TESTS`` names the tests that cover one; those about the protocol that had no test elsewhere are
in this file. ``ELSEWHERE`` says for the others which part of the system they are about.
"""

import ast
import asyncio
import pickle
import struct
from pathlib import Path

import msgpack
import pytest

from kvproto.errors import (
    ConnectionLost,
    DigestMismatch,
    HandshakeRefused,
    KvProtoError,
    LeaseError,
    LocalProtocolError,
    Malformed,
    PayloadTooLarge,
)
from kvproto.fields import MAX_U64
from kvproto.frame import MAX_DESCRIPTOR_NBYTES, decode_descriptor, decode_prefix
from kvproto.geometry import KvGeometry
from kvproto.handshake import Identity
from kvproto.header import Header, Kind
from kvproto.messages import Abort, AbortAck, CommitAck, Write
from kvproto.shape import MAX_SEQ_LEN
from kvproto.tcp import connect
from tests.kvproto.carrier_contract import (
    SMALL,
    WAIT_S,
    Kv,
    TcpRig,
    transfer,
    until,
    watched,
    write_all,
)
from tests.kvproto.fault_proxy import Faults

FOLDER = Path(__file__).parent
CONTRACT = "kvproto/test_carrier_contract.py"
HERE = "kvproto/test_public_failures.py"

TESTS: dict[str, tuple[str, ...]] = {
    "B01": (
        f"{HERE}::test_a_writer_that_dies_before_its_first_byte_gives_the_blocks_back",
        f"{CONTRACT}::test_a_killed_writer_gives_its_blocks_back_and_not_too_early",
    ),
    "B02": (
        f"{HERE}::test_a_writer_that_accepts_and_never_writes",
        f"{CONTRACT}::test_a_stopped_writer_is_noticed_and_never_writes_blocks_of_others",
    ),
    "B03": (
        f"{CONTRACT}::test_blocks_used_again_after_an_abort_are_never_written_by_the_slow_writer",
    ),
    "B05": (
        f"{CONTRACT}::test_nothing_is_visible_before_the_commit",
        f"{CONTRACT}::test_a_damaged_path_ends_in_a_typed_error_and_never_in_wrong_bytes",
    ),
    "B06": (
        f"{CONTRACT}::test_blocks_used_again_after_an_abort_are_never_written_by_the_slow_writer",
        f"{CONTRACT}::test_a_slow_write_that_completes_after_the_abort_is_not_counted",
        "kvproto/test_machines.py::TestLeaseMachine",
    ),
    "B07": (f"{HERE}::test_a_lost_control_message_ends_every_wait",),
    "B08": (f"{HERE}::test_a_burst_of_cancels_needs_no_traffic_to_clean_up",),
    "B10": (
        f"{CONTRACT}::test_a_commit_before_everything_was_written_is_refused",
        f"{CONTRACT}::test_a_commit_that_does_not_add_up_is_refused",
    ),
    "B11": (f"{CONTRACT}::test_a_new_writer_of_the_same_host_needs_no_restart_of_the_receiver",),
    "B17": (f"{HERE}::test_two_writers_with_ids_of_their_own_share_only_the_transfers",),
    "B19": ("kvproto/test_handshake.py::test_a_fact_that_differs_is_named_with_both_values",),
    "B20": (f"{HERE}::test_each_fact_that_differs_is_refused_by_its_name",),
    "B21": (
        f"{HERE}::test_layers_are_paired_by_name",
        f"{CONTRACT}::test_a_layer_that_the_model_lacks_is_refused",
    ),
    "B23": (f"{HERE}::test_each_fact_that_differs_is_refused_by_its_name",),
    "B24": (
        "kvproto/test_tcp.py::test_a_body_that_changed_on_its_way_is_found_by_the_digests",
        f"{HERE}::test_bytes_that_were_not_computed_yet_are_never_committed",
    ),
    "B28": (
        f"{CONTRACT}::test_bytes_are_equal_after_the_commit",
        "kvproto/test_digest.py::test_swapped_blocks_are_found",
    ),
    "B29": (
        f"{CONTRACT}::test_a_commit_before_everything_was_written_is_refused",
        f"{CONTRACT}::test_throttled_transfers_are_whole_at_the_moment_of_completion",
    ),
    "B36": (
        f"{HERE}::test_a_pickle_inside_msgpack_is_only_bytes_or_refused",
        "test_no_pickle.py::test_no_module_of_ours_has_an_unsafe_use",
        "kvproto/test_fuzz.py::test_changed_inputs_are_refused_or_decoded",
    ),
    "B37": (
        f"{HERE}::test_lengths_that_lie_are_refused_before_anything_is_allocated",
        f"{HERE}::test_a_range_that_overflows_is_refused",
        f"{CONTRACT}::test_a_write_without_permission_changes_nothing",
        "kvproto/test_fuzz.py::test_no_input_takes_more_memory_than_the_announced_limit",
        "kvproto/test_tcp_server.py::test_peers_beyond_the_limit_are_told_so",
        "kvproto/test_tcp_server.py::test_refusals_are_bounded_too",
    ),
    "B38": (
        "kvproto/test_tcp_server.py::test_beyond_this_host_only_with_a_secret",
        "kvproto/test_connection.py::test_secrets_that_differ",
        "kvproto/test_connection.py::test_nothing_but_auth_comes_after_hello",
        "kvproto/test_connection.py::test_a_mac_sent_back_to_its_maker_is_refused",
    ),
}
ELSEWHERE: dict[str, str] = {
    "B14": "decode service: a refusal before admission releases what prefill holds",
    "B16": "router: who owns a request between the two workers",
    "B22": "draft models: nothing is guessed, since every region is declared",
    "B25": "schedulers: circular waits on a bounded buffer",
    "B26": "prefix cache: keys that are the same in every process",
    "B30": "engine: state of speculative decoding",
    "B31": "engine: state of grammars",
    "B32": "engine: log-probabilities of the first token",
    "B33": "prefix cache: keys that contain the adapter",
    "B35": "decode scheduler: a preempted sequence has a way back",
    "B39": "router: addresses come from the registry alone",
    "B40": "prefix cache: keys that contain the tenant",
}
# Ids of the list that are about the life of transfers, wrong output, and security.
IDS = {f"B{number:02}" for number in range(1, 41)} - {
    f"B{number:02}" for number in (4, 9, 12, 13, 15, 18, 27, 34)
}


def named_tests(path: Path) -> set[str]:
    """Names of the test functions and classes in a file, also those that are assigned."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith(("test_", "Test"))}


@pytest.mark.parametrize("failure", TESTS)
def test_the_tests_named_here_exist(failure):
    for name in TESTS[failure]:
        file, test = name.split("::")
        assert test in named_tests(FOLDER.parent / file), name


def test_every_failure_is_covered_or_placed():
    assert TESTS.keys() | ELSEWHERE.keys() == IDS
    assert not TESTS.keys() & ELSEWHERE.keys()


@pytest.fixture
def tcp(run):
    """Runs a scenario with a rig of the TCP carrier."""
    return lambda scenario, **settings: run(watched(TcpRig, scenario, **settings))


# -- lifetime --------------------------------------------------------------------------------------


def test_a_writer_that_dies_before_its_first_byte_gives_the_blocks_back(tcp):
    """B01."""

    async def scenario(rig):
        sender = await rig.dial()
        grant = rig.receiver.grant(100)
        assert rig.receiver.blocks.num_free_blocks < rig.receiver.blocks.num_blocks
        await sender.drop()
        assert isinstance(await asyncio.wait_for(grant.outcome, WAIT_S), ConnectionLost)
        await until(grant.released.is_set)
        assert rig.receiver.blocks.num_free_blocks == rig.receiver.blocks.num_blocks

    tcp(scenario)


def test_a_writer_that_accepts_and_never_writes(tcp):
    """B02: alive, so that no keepalive helps; the receiver's own deadline and cut do."""

    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        grant = receiver.grant(100)
        await until(lambda: "p" in receiver.peers)
        # The deadline of the lease has come: ask, get no answer, cut.
        await receiver.abort(grant)
        assert isinstance(await sender.answer(grant.sequence_id), Abort)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(grant.released.wait(), 0.05)
        assert receiver.blocks.stats()["quarantined"] == len(grant.block_table)
        rig.cut("p")
        await until(grant.released.is_set)
        assert receiver.blocks.num_free_blocks == receiver.blocks.num_blocks
        assert isinstance(await sender.ended(), ConnectionLost)

    tcp(scenario)


LOST = ["COMMIT", "COMMIT_ACK", "ABORT", "ABORT_ACK"]


@pytest.mark.parametrize("lost", LOST)
def test_a_lost_control_message_ends_every_wait(tcp, lost):
    """B07: on a stream only everything from a message on can be lost; nobody waits for ever."""

    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        link = sender.link
        kv = Kv(SMALL, 20, seed=1)
        grant = receiver.grant(20, expected=kv)
        await write_all(rig.writer(sender, grant, SMALL), grant, kv, 7)
        nbytes = sum(view.nbytes for view in kv.regions.values())
        await until(lambda: receiver.leases.landed_nbytes(grant.generation) == nbytes)

        stream = link.to_target if lost in {"COMMIT", "ABORT_ACK"} else link.to_source
        if lost == "ABORT_ACK":
            await receiver.abort(grant)
            assert isinstance(await sender.answer(grant.sequence_id), Abort)
        stream.faults = Faults(truncate_at=stream.num_read_nbytes)
        if lost in {"COMMIT", "COMMIT_ACK"}:
            await sender.peer.send(kv.commit(grant))
        elif lost == "ABORT":
            await receiver.abort(grant)
        else:
            await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))

        with pytest.raises(ConnectionLost):
            await sender.answer(grant.sequence_id)
        await until(lambda: rig.num_writers == 0)
        outcome = await asyncio.wait_for(grant.outcome, WAIT_S)
        if lost == "COMMIT_ACK":
            # Complete all the same: the receiver is the one that says so.
            assert outcome is None
            assert receiver.holds(grant, kv)
        else:
            assert isinstance(outcome, KvProtoError)
            assert receiver.blocks.num_free_blocks == receiver.blocks.num_blocks

    tcp(scenario, keepalive_s=0.15)


def test_a_burst_of_cancels_needs_no_traffic_to_clean_up(tcp):
    """B08: cancel everything at once, send nothing more, and wait."""

    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        grants = [receiver.grant(8) for _ in range(30)]
        await until(lambda: "p" in receiver.peers)
        async with asyncio.TaskGroup() as tasks:
            for grant in grants:
                tasks.create_task(receiver.abort(grant))
        for grant in grants:
            assert isinstance(await sender.answer(grant.sequence_id), Abort)
            await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))
        async with asyncio.timeout(WAIT_S):
            for grant in grants:
                await grant.released.wait()
        assert receiver.blocks.num_free_blocks == receiver.blocks.num_blocks
        await sender.close()

    tcp(scenario)


def test_two_writers_with_ids_of_their_own_share_only_the_transfers(tcp):
    """B17: one id is made once and carried; what a writer calls itself plays no part."""

    async def scenario(rig):
        names = ("randomised-a81f", "randomised-77c0")
        for name in names:
            sender = await rig.dial(name)
            kv = Kv(SMALL, 6, seed=2)
            grant = rig.receiver.grant(6, writer=name, expected=kv)
            assert isinstance(await transfer(rig, sender, grant, kv), CommitAck)
            await sender.close()

    tcp(scenario)


# -- wrong output ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fact", sorted(SMALL.facts()))
def test_each_fact_that_differs_is_refused_by_its_name(tcp, fact):
    """B20, B23: at the start, not at the first transfer."""

    async def scenario(rig):
        facts = SMALL.facts()
        other = facts[fact] + 1 if isinstance(facts[fact], int) else "another"
        identity = Identity("prefill", "p", {**facts, fact: other})
        with pytest.raises(HandshakeRefused) as excinfo:
            await connect("127.0.0.1", rig._server.port, identity=identity, timeout_s=WAIT_S)
        assert excinfo.value.field == fact
        await until(lambda: rig.num_writers == 0)

    tcp(scenario)


def test_layers_are_paired_by_name(tcp):
    """B21: a sender that counts its layers in another order puts each where its name says."""

    async def scenario(rig):
        shuffled = KvGeometry.uniform(3, 2, 8, "float32", ("layers.2", "layers.0", "layers.1"))
        sender = await rig.dial()
        grant = rig.receiver.grant(9)
        kv = Kv(shuffled, 9, seed=3)
        await write_all(rig.writer(sender, grant, shuffled), grant, kv, 4)
        # By position the digests are of other layers: refused, since the order is the model's.
        await sender.peer.send(kv.commit(grant))
        assert isinstance(await sender.answer(grant.sequence_id), Abort)
        assert isinstance(await grant.outcome, DigestMismatch)
        for index, name in enumerate(shuffled.layer_names):
            layer = SMALL.layer_names.index(name)
            for region in range(2):
                landed = rig.receiver.region_bytes(grant, layer, region)
                assert landed == kv.regions[index, region]
        await sender.close()

    tcp(scenario)


def test_bytes_that_were_not_computed_yet_are_never_committed(tcp):
    """B24: a chunk that was sent before it was filled does not pass as the filled one."""

    async def scenario(rig):
        sender = await rig.dial()
        grant = rig.receiver.grant(12)
        early, computed = Kv(SMALL, 12, value=0), Kv(SMALL, 12, seed=4)
        await write_all(rig.writer(sender, grant, SMALL), grant, early, 5)
        await sender.peer.send(computed.commit(grant))
        assert isinstance(await sender.answer(grant.sequence_id), Abort)
        assert isinstance(await grant.outcome, DigestMismatch)
        assert rig.receiver.blocks.stats()["committed"] == 0
        await sender.close()

    tcp(scenario)


# -- security --------------------------------------------------------------------------------------


def test_a_pickle_inside_msgpack_is_only_bytes_or_refused():
    """B36: no extension type exists that anything could be hidden in."""
    data = pickle.dumps(Path("x"))
    assert decode_descriptor(msgpack.packb({"a": data})) == {"a": data}
    for code in (0, 1, 5, 127, -1):
        hidden = msgpack.packb({"a": msgpack.ExtType(code & 127, data)})
        with pytest.raises(Malformed):
            decode_descriptor(hidden)


@pytest.mark.parametrize("nbytes", [(1 << 31), (1 << 32) - 1, 1 << 63, MAX_U64])
def test_lengths_that_lie_are_refused_before_anything_is_allocated(nbytes):
    """B37."""
    raw = Header(Kind.WRITE, nbytes, 0).encode()
    with pytest.raises(PayloadTooLarge):
        Header.decode(raw, max_payload_nbytes=1 << 20)
    believed = Header(Kind.WRITE, min(nbytes, 1 << 32), 0)
    for descriptor_nbytes in (MAX_DESCRIPTOR_NBYTES + 1, (1 << 31), (1 << 32) - 1):
        prefix = struct.pack("<I" if believed.order == 1 else ">I", descriptor_nbytes)
        with pytest.raises(Malformed):
            decode_prefix(prefix, believed)


@pytest.mark.parametrize(
    ("first_token", "num_tokens"),
    [(MAX_SEQ_LEN, 1), (MAX_SEQ_LEN, MAX_SEQ_LEN), (8, 1), (7, 2), (1 << 20, MAX_SEQ_LEN)],
)
def test_a_range_that_overflows_is_refused(tcp, first_token, num_tokens):
    """B37: no sum of coordinates comes round to something allowed."""

    async def scenario(rig):
        receiver = rig.receiver
        grant = receiver.grant(8)
        write = Write(grant.sequence_id, grant.generation, "layers.0", first_token, num_tokens)
        before = bytes(receiver.pool)
        nbytes, word = SMALL.write_nbytes(0, num_tokens), SMALL.shape_word(0, num_tokens)
        with pytest.raises(LeaseError):
            receiver.leases.destination(write, nbytes, word, "p")
        assert receiver.pool == before
        with pytest.raises(LocalProtocolError):
            receiver.leases.release(grant.generation)

    tcp(scenario)
