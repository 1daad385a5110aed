"""What every carrier must do, for each carrier there is; see ``carrier_contract``.

Each scenario runs on both event loops, and must leave no descriptor, task, thread, mapping, child
process or view of the pool behind.
"""

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from kvproto.errors import (
    ConnectionLost,
    DigestMismatch,
    ErrorCode,
    KvProtoError,
    LeaseError,
    LocalProtocolError,
    PeerError,
    RemoteProtocolError,
)
from kvproto.messages import Abort, AbortAck, CommitAck, Error
from kvproto.state import BlockState
from tests.kvproto.carrier_contract import (
    LARGE,
    RENAMED,
    SMALL,
    WAIT_S,
    Kv,
    TcpRig,
    nothing_left_behind,
    transfer,
    until,
    watched,
    write_all,
)
from tests.kvproto.fault_proxy import Faults
from tests.kvproto.mapped_rig import MappedRig

IS_LONG = os.environ.get("PD_LONG_TESTS") == "1"
NUM_THROTTLED = 1000 if IS_LONG else 40
NUM_FAULT_PLACES = 60 if IS_LONG else 10
LONG_TIMEOUT = pytest.mark.timeout(600 if IS_LONG else 60)
FILLED = 0xEE
STALE = 0xAA


# A new carrier joins here.
RIGS = (TcpRig, MappedRig)


@pytest.fixture(params=RIGS, ids=lambda rig: rig.name)
def contract(request, run):
    """Runs ``scenario(rig)`` with a fresh rig made with the given settings."""
    return lambda scenario, **settings: run(watched(request.param, scenario, **settings))


async def refusal(sender, grant, writing) -> KvProtoError | Error:
    """How a write was refused: by the writer's own side, or by the receiver's ERROR."""
    try:
        await writing
    except (LocalProtocolError, LeaseError) as exc:
        return exc
    answer = await sender.answer(grant.sequence_id)
    assert isinstance(answer, Error)
    assert answer.code == ErrorCode.LEASE
    return answer


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_bytes_are_equal_after_the_commit(contract, chunk_tokens):
    """Scattered blocks, several layers, chunks that end inside blocks."""

    async def scenario(rig):
        rig.receiver.scatter(seed=chunk_tokens)
        kv = Kv(SMALL, 61, seed=1)
        grant = rig.receiver.grant(61, expected=kv)
        assert grant.block_table != sorted(range(grant.block_table[0], grant.block_table[0] + 16))
        sender = await rig.dial()
        answer = await transfer(rig, sender, grant, kv, chunk_tokens=chunk_tokens)
        assert answer == CommitAck(grant.sequence_id, grant.generation)
        assert grant.outcome.result() is None
        assert rig.receiver.holds(grant, kv)
        await sender.close()

    contract(scenario)


def test_large_writes_are_equal_too(contract):
    async def scenario(rig):
        rig.receiver.scatter(seed=3)
        kv = Kv(LARGE, 300, seed=2)
        grant = rig.receiver.grant(300, expected=kv)
        sender = await rig.dial()
        assert isinstance(await transfer(rig, sender, grant, kv, chunk_tokens=170), CommitAck)
        assert rig.receiver.holds(grant, kv)
        await sender.close()

    contract(scenario, geometry=LARGE, num_blocks=40, block_size=16)


def test_nothing_outside_the_grant_is_touched(contract):
    async def scenario(rig):
        receiver = rig.receiver
        receiver.pool[:] = bytes([FILLED]) * receiver.pool.nbytes
        kv = Kv(SMALL, 10, value=0)
        grant = receiver.grant(10, expected=kv)
        sender = await rig.dial()
        await transfer(rig, sender, grant, kv)
        num_zero = bytes(receiver.pool).count(0)
        assert num_zero == 10 * SMALL.kv_token_nbytes
        assert bytes(receiver.pool).count(FILLED) == receiver.pool.nbytes - num_zero
        await sender.close()

    contract(scenario)


def test_concurrent_sequences_of_several_writers_do_not_mix(contract):
    async def scenario(rig):
        rig.receiver.scatter(seed=4)
        senders = [await rig.dial(f"p{number}") for number in range(3)]
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                num_tokens = 1 + number % 10
                kv = Kv(SMALL, num_tokens, seed=number)
                grant = rig.receiver.grant(num_tokens, writer=f"p{number % 3}", expected=kv)
                tasks.create_task(
                    transfer(rig, senders[number % 3], grant, kv, chunk_tokens=1 + number % 4)
                )
        grants = rig.receiver.grants.values()
        assert [grant.outcome.result() for grant in grants] == [None] * 12
        assert all(rig.receiver.holds(grant, grant.expected) for grant in grants)
        for sender in senders:
            await sender.close()

    contract(scenario, num_blocks=128)


def test_a_senders_memory_may_change_after_flush(contract):
    async def scenario(rig):
        kv, original = Kv(LARGE, 256, seed=5), Kv(LARGE, 256, seed=5)
        grant = rig.receiver.grant(256, expected=original)
        sender = await rig.dial()
        await write_all(rig.writer(sender, grant, LARGE), grant, kv, 100)
        for view in kv.regions.values():
            view[:] = bytes(view.nbytes)
        await sender.peer.send(original.commit(grant))
        assert isinstance(await sender.answer(grant.sequence_id), CommitAck)
        assert rig.receiver.holds(grant, original)
        await sender.close()

    contract(scenario, geometry=LARGE)


@LONG_TIMEOUT
def test_throttled_transfers_are_whole_at_the_moment_of_completion(contract):
    """``Receiver`` compares while it handles COMMIT; nothing may still be on its way then."""

    async def scenario(rig):
        sizes = random.Random(6)
        path = Faults(piece_nbytes=lambda: sizes.choice([1, 700, 5000]), nbytes_per_s=8e6)
        numbers = iter(range(NUM_THROTTLED))

        async def prefill(name):
            sender = await rig.dial(name, path)
            for number in numbers:
                num_tokens = 1 + number % 23
                kv = Kv(SMALL, num_tokens, seed=number)
                grant = rig.receiver.grant(num_tokens, writer=name, expected=kv)
                answer = await transfer(rig, sender, grant, kv, chunk_tokens=1 + number % 11)
                assert isinstance(answer, CommitAck)
                rig.receiver.blocks.free(grant.block_table, grant.sequence_id)
            await sender.close()

        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(prefill(f"p{number}"))
        assert len(rig.receiver.grants) == NUM_THROTTLED
        assert rig.receiver.wrong == []
        assert rig.receiver.blocks.num_free_blocks == rig.receiver.blocks.num_blocks

    contract(scenario)


# -- before the commit -----------------------------------------------------------------------------


def test_nothing_is_visible_before_the_commit(contract):
    async def scenario(rig):
        receiver = rig.receiver
        kv = Kv(SMALL, 8, seed=7)
        grant = receiver.grant(8, expected=kv)
        sender = await rig.dial()
        await write_all(rig.writer(sender, grant, SMALL), grant, kv, 3)
        nbytes = sum(view.nbytes for view in kv.regions.values())
        await until(lambda: receiver.leases.landed_nbytes(grant.generation) == nbytes)
        # Everything is there, and nobody says so: the blocks still belong to the writer.
        assert not grant.outcome.done()
        states = {receiver.blocks.block(block).state for block in grant.block_table}
        assert states == {BlockState.WRITABLE}
        with pytest.raises(LocalProtocolError):
            receiver.blocks.free(grant.block_table, grant.sequence_id)
        with pytest.raises(LocalProtocolError):
            receiver.leases.release(grant.generation)
        await sender.peer.send(kv.commit(grant))
        assert isinstance(await sender.answer(grant.sequence_id), CommitAck)
        states = {receiver.blocks.block(block).state for block in grant.block_table}
        assert states == {BlockState.COMMITTED}
        await sender.close()

    contract(scenario)


# Coordinates that have no permission: (name, changes the write as (generation, first, count)).
REFUSED: dict[str, Callable[[int], tuple[int, int, int]]] = {
    "unknown generation": lambda generation: (generation + 100, 4, 2),
    "duplicate": lambda generation: (generation, 0, 4),
    "part again": lambda generation: (generation, 2, 2),
    "overlap": lambda generation: (generation, 3, 4),
    "gap": lambda generation: (generation, 5, 2),
    "beyond the grant": lambda generation: (generation, 4, 5),
    "all beyond the grant": lambda generation: (generation, 8, 1),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_write_without_permission_changes_nothing(contract, fault):
    async def scenario(rig):
        receiver = rig.receiver
        kv = Kv(SMALL, 16, seed=8)
        grant = receiver.grant(8)
        sender = await rig.dial()
        writer = rig.writer(sender, grant, SMALL)
        name, generation = grant.sequence_id, grant.generation
        await writer.write(name, generation, 0, 0, 4, kv.pieces(0, 0, 4))
        await writer.flush()
        token_nbytes = SMALL.write_nbytes(0, 1)
        await until(lambda: receiver.leases.landed_nbytes(generation) == 4 * token_nbytes)
        before = bytes(receiver.pool)

        wrong, first, count = REFUSED[fault](generation)
        pieces = Kv(SMALL, 16, value=STALE).pieces(0, first, count)
        await refusal(sender, grant, writer.write(name, wrong, 0, first, count, pieces))
        assert receiver.pool == before
        assert receiver.leases.quiesced(generation)

        # The connection and the lease are as good as before.
        expected = Kv(SMALL, 8, seed=9)
        for region in range(2):
            expected.regions[0, region][: 4 * 64] = kv.pieces(0, 0, 4)[region]
        grant.expected = expected
        await writer.write(name, generation, 0, 4, 4, expected.pieces(0, 4, 4))
        for layer in (1, 2):
            await writer.write(name, generation, layer, 0, 8, expected.pieces(layer, 0, 8))
        await writer.flush()
        await sender.peer.send(expected.commit(grant))
        assert isinstance(await sender.answer(name), CommitAck)
        await sender.close()

    contract(scenario)


def test_a_layer_that_the_model_lacks_is_refused(contract):
    async def scenario(rig):
        grant = rig.receiver.grant(8)
        sender = await rig.dial()
        before = bytes(rig.receiver.pool)
        writer = rig.writer(sender, grant, RENAMED)
        pieces = Kv(RENAMED, 8, value=STALE).pieces(2, 0, 8)
        writing = writer.write(grant.sequence_id, grant.generation, 2, 0, 8, pieces)
        await refusal(sender, grant, writing)
        assert rig.receiver.pool == before
        kv = Kv(SMALL, 8, seed=10)
        assert isinstance(await transfer(rig, sender, grant, kv), CommitAck)
        await sender.close()

    contract(scenario)


def test_a_writer_that_the_lease_does_not_name_is_refused(contract):
    async def scenario(rig):
        grant = rig.receiver.grant(8, writer="p")
        thief, owner = await rig.dial("q"), await rig.dial("p")
        before = bytes(rig.receiver.pool)
        writer = rig.writer(thief, grant, SMALL)
        pieces = Kv(SMALL, 8, value=STALE).pieces(0, 0, 8)
        writing = writer.write(grant.sequence_id, grant.generation, 0, 0, 8, pieces)
        await refusal(thief, grant, writing)
        assert rig.receiver.pool == before
        kv = Kv(SMALL, 8, seed=11)
        grant.expected = kv
        assert isinstance(await transfer(rig, owner, grant, kv), CommitAck)
        await thief.close()
        await owner.close()

    contract(scenario)


def test_a_generation_that_was_revoked_is_refused(contract):
    async def scenario(rig):
        receiver = rig.receiver
        grant = receiver.grant(8)
        sender = await rig.dial()
        await until(lambda: "p" in receiver.peers)
        await receiver.abort(grant)
        assert isinstance(await sender.answer(grant.sequence_id), Abort)
        await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))
        async with asyncio.timeout(WAIT_S):
            await grant.released.wait()
        before = bytes(receiver.pool)
        kv = Kv(SMALL, 8, value=STALE)
        writing = write_all(rig.writer(sender, grant, SMALL), grant, kv, 8)
        await refusal(sender, grant, writing)
        assert receiver.pool == before
        # The blocks are free and the connection is sound.
        kv = Kv(SMALL, 8, seed=12)
        again = receiver.grant(8, expected=kv)
        assert again.block_table == grant.block_table
        assert isinstance(await transfer(rig, sender, again, kv), CommitAck)
        await sender.close()

    contract(scenario)


# -- the commit ------------------------------------------------------------------------------------

FALSE_COMMITS = {
    "fewer tokens": lambda commit: replace(commit, num_tokens=7),
    "more tokens": lambda commit: replace(commit, num_tokens=9),
    "fewer bytes": lambda commit: replace(commit, nbytes=commit.nbytes - 1),
    "more bytes": lambda commit: replace(commit, nbytes=commit.nbytes + 1),
    "a wrong digest": lambda commit: replace(
        commit, digests=[*commit.digests[:-1], commit.digests[-1] ^ 1]
    ),
    "digests exchanged": lambda commit: replace(commit, digests=commit.digests[::-1]),
    "a digest too few": lambda commit: replace(commit, digests=commit.digests[:-1]),
    "a digest too many": lambda commit: replace(commit, digests=[*commit.digests, 1]),
}


@pytest.mark.parametrize("fault", FALSE_COMMITS)
def test_a_commit_that_does_not_add_up_is_refused(contract, fault):
    async def scenario(rig):
        receiver = rig.receiver
        kv = Kv(SMALL, 8, seed=13)
        grant = receiver.grant(8)
        sender = await rig.dial()
        await write_all(rig.writer(sender, grant, SMALL), grant, kv, 3)
        await sender.peer.send(FALSE_COMMITS[fault](kv.commit(grant)))
        answer = await sender.answer(grant.sequence_id)
        assert isinstance(answer, Abort)
        error = await grant.outcome
        assert type(error) is (DigestMismatch if "digest" in fault else LeaseError)
        assert receiver.blocks.stats()["quarantined"] == 2
        assert receiver.blocks.stats()["committed"] == 0
        await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))
        async with asyncio.timeout(WAIT_S):
            await grant.released.wait()
        assert receiver.blocks.num_free_blocks == receiver.blocks.num_blocks
        again = receiver.grant(8, expected=kv)
        assert isinstance(await transfer(rig, sender, again, kv), CommitAck)
        await sender.close()

    contract(scenario)


def test_a_commit_before_everything_was_written_is_refused(contract):
    async def scenario(rig):
        kv = Kv(SMALL, 8, seed=14)
        grant = rig.receiver.grant(8)
        sender = await rig.dial()
        writer = rig.writer(sender, grant, SMALL)
        for layer in (0, 1):
            pieces = kv.pieces(layer, 0, 8)
            await writer.write(grant.sequence_id, grant.generation, layer, 0, 8, pieces)
        await writer.flush()
        await sender.peer.send(kv.commit(grant))
        assert isinstance(await sender.answer(grant.sequence_id), Abort)
        assert "layers.2 has 0 of 8 tokens" in str(await grant.outcome)
        await sender.close()

    contract(scenario)


def test_terminal_messages_are_idempotent(contract):
    async def scenario(rig):
        receiver = rig.receiver
        kv = Kv(SMALL, 8, seed=15)
        sender = await rig.dial()
        done, aborted = receiver.grant(8, expected=kv), receiver.grant(8)
        await transfer(rig, sender, done, kv)
        await receiver.abort(aborted)
        await receiver.abort(aborted)
        for _ in range(2):
            assert isinstance(await sender.answer(aborted.sequence_id), Abort)
            await sender.peer.send(AbortAck(aborted.sequence_id, aborted.generation))
        # The writer's own ABORT after the end, and its ABORT_ACK and COMMIT once more.
        for grant in (done, aborted):
            await sender.peer.send(Abort(grant.sequence_id, grant.generation, 9, "late"))
            await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))
            await sender.peer.send(kv.commit(grant))
            answer = await sender.answer(grant.sequence_id)
            assert isinstance(answer, Error)
            assert answer.code == ErrorCode.LEASE
        assert receiver.blocks.stats()["committed"] == 2
        assert receiver.blocks.num_free_blocks == receiver.blocks.num_blocks - 2
        assert receiver.leases.stats()["num_leases"] == 0
        assert receiver.holds(done, kv)
        await sender.close()

    contract(scenario)


# -- abort in mid-transfer -------------------------------------------------------------------------


def fill(receiver) -> bytes:
    """Give every block to another sequence and fill it; what must still be there at the end."""
    table = receiver.blocks.allocate("heir", receiver.blocks.num_blocks)
    assert len(table) == receiver.blocks.num_blocks
    receiver.pool[:] = bytes([FILLED]) * receiver.pool.nbytes
    return bytes(receiver.pool)


@pytest.mark.parametrize("ending", ["acknowledged", "cut"])
def test_blocks_used_again_after_an_abort_are_never_written_by_the_slow_writer(contract, ending):
    async def scenario(rig):
        receiver = rig.receiver
        grant = receiver.grant(256)
        sender = await rig.dial()
        kv = Kv(LARGE, 256, value=STALE)
        slow = await rig.slow_write(sender, grant, kv, layer=1)

        # Everybody else wants these blocks now; none of them gets one before there is proof.
        await receiver.abort(grant)
        assert receiver.blocks.stats()["quarantined"] == receiver.blocks.num_blocks
        with pytest.raises(LocalProtocolError):
            receiver.release(grant)
        assert isinstance(await sender.answer(grant.sequence_id), Abort)

        if ending == "acknowledged":
            await slow.go_on()
            await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))
            async with asyncio.timeout(WAIT_S):
                await grant.released.wait()
            before = fill(receiver)
            # The stale writer has not understood and begins once more.
            with suppress(LocalProtocolError, LeaseError):
                await write_all(rig.writer(sender, grant, LARGE), grant, kv, 64)
            await sender.close()
        else:
            rig.cut("p")
            if not rig.end_is_proof:
                assert receiver.blocks.num_free_blocks == 0
                return
            await until(grant.released.is_set)
            before = fill(receiver)
            await slow.go_on()
            assert isinstance(await sender.ended(), ConnectionLost)
        await until(lambda: rig.num_writers == 0)
        assert receiver.pool == before

    contract(scenario, geometry=LARGE)


def test_a_slow_write_that_completes_after_the_abort_is_not_counted(contract):
    async def scenario(rig):
        receiver = rig.receiver
        grant = receiver.grant(128)
        sender = await rig.dial()
        kv = Kv(LARGE, 128, seed=16)
        slow = await rig.slow_write(sender, grant, kv, layer=0)
        await receiver.abort(grant)
        await slow.go_on()
        assert isinstance(await sender.answer(grant.sequence_id), Abort)
        await until(lambda: receiver.leases.quiesced(grant.generation))
        assert receiver.leases.landed_nbytes(grant.generation) == 0
        await sender.peer.send(kv.commit(grant))
        answer = await sender.answer(grant.sequence_id)
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.LEASE
        assert isinstance(await grant.outcome, PeerError)
        assert receiver.blocks.stats()["committed"] == 0
        await sender.close()

    contract(scenario, geometry=LARGE)


def test_other_sequences_go_on_while_one_is_aborted(contract):
    async def scenario(rig):
        receiver = rig.receiver
        stuck, fine = await rig.dial("stuck"), await rig.dial("fine")
        held = receiver.grant(64, writer="stuck")
        slow = await rig.slow_write(stuck, held, Kv(LARGE, 64, value=STALE), layer=0)
        await receiver.abort(held)
        kv = Kv(LARGE, 64, seed=17)
        grant = receiver.grant(64, writer="fine", expected=kv)
        assert isinstance(await transfer(rig, fine, grant, kv, chunk_tokens=20), CommitAck)
        await slow.go_on()
        assert receiver.holds(grant, kv)
        await fine.close()

    contract(scenario, geometry=LARGE)


# -- writers that die ------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_killed_writer_gives_its_blocks_back_and_not_too_early(contract):
    async def scenario(rig):
        receiver = rig.receiver
        grant = receiver.grant(256)
        process = await rig.spawn_writer(grant, STALE)
        process.kill()
        # Its bytes are still on their way: nobody may have the blocks.
        receiver.leases.revoke(grant.generation)
        with pytest.raises(LocalProtocolError):
            receiver.release(grant)
        assert receiver.blocks.num_free_blocks == 0
        process.unblock()
        assert isinstance(await asyncio.wait_for(grant.outcome, WAIT_S), KvProtoError)
        await until(grant.released.is_set)
        before = fill(receiver)
        await until(lambda: rig.num_writers == 0)
        assert receiver.pool == before

    contract(scenario, geometry=LARGE)


@pytest.mark.timeout(60)
def test_a_stopped_writer_is_noticed_and_never_writes_blocks_of_others(contract):
    """SIGSTOP: no end of the connection, no answer, and everything still in its hands."""

    async def scenario(rig):
        receiver = rig.receiver
        grant = receiver.grant(256)
        process = await rig.spawn_writer(grant, STALE)
        process.stop()
        process.unblock()
        # Nobody tells: the receiver's own keepalive finds the silence.
        error = await asyncio.wait_for(grant.outcome, WAIT_S)
        assert isinstance(error, ConnectionLost)
        if rig.end_is_proof:
            await until(grant.released.is_set)
            before = fill(receiver)
        else:
            assert receiver.blocks.num_free_blocks == 0
            before = None
        process.wake()
        assert await process.exited() == 0
        if before is not None:
            assert receiver.pool == before

    contract(scenario, geometry=LARGE, keepalive_s=0.3)


def test_a_new_writer_of_the_same_host_needs_no_restart_of_the_receiver(contract):
    async def scenario(rig):
        for number in range(3):
            sender = await rig.dial(f"p{number}")
            kv = Kv(SMALL, 9, seed=number)
            grant = rig.receiver.grant(9, writer=f"p{number}", expected=kv)
            assert isinstance(await transfer(rig, sender, grant, kv), CommitAck)
            lost = rig.receiver.grant(9, writer=f"p{number}")
            await sender.drop()
            assert isinstance(await asyncio.wait_for(lost.outcome, WAIT_S), ConnectionLost)
        assert rig.receiver.blocks.stats()["committed"] == 9

    contract(scenario)


# -- a damaged path --------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[int], Faults]] = {
    "cut with RST": lambda offset: Faults(cut_at=offset),
    "cut with FIN": lambda offset: Faults(cut_at=offset, is_reset=False),
    "one byte twice": lambda offset: Faults(duplicate=(offset, 1)),
    "many bytes twice": lambda offset: Faults(duplicate=(offset, 999)),
    "a bit flipped": lambda offset: Faults(flip_at=offset, flip_bit=offset % 8),
    "the rest swallowed": lambda offset: Faults(truncate_at=offset),
}


async def attempt(rig, direction: str, faults: Faults) -> KvProtoError | None:
    """One transfer over a damaged path: None if it was committed, else the sender's error.

    Whatever happens, no lease stays, and the receiver finds out without being told.
    """
    receiver = rig.receiver
    kv = Kv(SMALL, 40, seed=18)
    try:
        sender = await rig.dial(**{direction: faults})
    except KvProtoError as exc:
        await until(lambda: rig.num_writers == 0)
        return exc
    grant = receiver.grant(40, expected=kv)
    error: KvProtoError | None = None
    try:
        answer = await transfer(rig, sender, grant, kv, chunk_tokens=15)
        if not isinstance(answer, CommitAck):
            error = await grant.outcome
    except KvProtoError as exc:
        error = exc
        # Both sides notice by themselves that the path is broken.
        async with asyncio.timeout(WAIT_S):
            await sender.ended()
        await until(lambda: rig.num_writers == 0)
    await sender.drop()
    await until(lambda: rig.num_writers == 0)
    receiver.writer_ended("p", ConnectionLost("it never got through its handshake"))
    is_committed = grant.outcome.result() is None
    assert receiver.wrong == []
    assert receiver.leases.stats()["num_leases"] == 0
    if is_committed:
        assert receiver.holds(grant, kv)
        receiver.blocks.free(grant.block_table, grant.sequence_id)
    assert receiver.blocks.num_free_blocks == receiver.blocks.num_blocks
    return error


@LONG_TIMEOUT
@pytest.mark.parametrize("direction", ["to_receiver", "to_sender"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_path_ends_in_a_typed_error_and_never_in_wrong_bytes(contract, fault, direction):
    async def scenario(rig):
        stream = "to_target" if direction == "to_receiver" else "to_source"
        assert await attempt(rig, direction, Faults()) is None
        num_bytes = getattr(rig.senders[-1].link, stream).num_passed_nbytes
        places = random.Random(fault)
        num_places = NUM_FAULT_PLACES
        if fault == "the rest swallowed" and not IS_LONG:
            num_places = 3  # each waits for the keepalive
        for _ in range(num_places):
            offset = places.randrange(num_bytes)
            error = await attempt(rig, direction, FAULTS[fault](offset))
            if direction == "to_receiver" and offset < num_bytes - 2000:
                assert error is not None, offset
            assert error is None or isinstance(error, KvProtoError)

    contract(scenario, keepalive_s=0.15)


def test_damage_in_the_bytes_of_kv_is_named(contract):
    """Not just any error: the receiver says that bytes were damaged."""

    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        grant = receiver.grant(256)
        rig.damage_kv(sender, LARGE.write_nbytes(0, 128))
        with suppress(ConnectionLost):
            await transfer(rig, sender, grant, Kv(LARGE, 256, seed=19), chunk_tokens=256)
        error = await asyncio.wait_for(grant.outcome, WAIT_S)
        cause = error.__cause__ or error
        assert isinstance(cause, DigestMismatch | RemoteProtocolError)
        assert cause.code in {ErrorCode.DIGEST_MISMATCH, ErrorCode.CHECKSUM_MISMATCH}
        await sender.drop()

    contract(scenario, geometry=LARGE)


def test_a_partition_ends_every_wait(contract):
    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        grant = receiver.grant(256)
        writer = rig.writer(sender, grant, LARGE)
        kv = Kv(LARGE, 256, value=STALE)
        sender.link.pause()

        async def write_for_ever():
            while True:
                # A carrier that counts at the sender refuses the second round.
                with suppress(LocalProtocolError):
                    await write_all(writer, grant, kv, 64)
                await asyncio.sleep(0)

        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ConnectionLost):
                await write_for_ever()
            with pytest.raises(ConnectionLost):
                await writer.flush()
            with pytest.raises(ConnectionLost):
                await sender.answer(grant.sequence_id)
            assert isinstance(await grant.outcome, ConnectionLost)
        await until(lambda: rig.num_writers == 0)

    contract(scenario, geometry=LARGE, keepalive_s=0.15)


# -- the suite itself ------------------------------------------------------------------------------


def test_a_leak_is_found(run):
    async def scenario():
        leaked = []
        with pytest.raises(AssertionError, match="left behind"):
            async with nothing_left_behind(wait_s=0.05):
                leaked += os.pipe()
        for descriptor in leaked:
            os.close(descriptor)

    run(scenario())


def test_wrong_bytes_are_found(contract):
    """A receiver that would commit other bytes than expected does not pass unnoticed."""

    async def scenario(rig):
        sender = await rig.dial()
        grant = rig.receiver.grant(8, expected=Kv(SMALL, 8, seed=20))
        assert isinstance(await transfer(rig, sender, grant, Kv(SMALL, 8, seed=21)), CommitAck)
        assert rig.receiver.wrong == [grant.sequence_id]
        rig.receiver.wrong.clear()
        await sender.close()

    contract(scenario)


def test_memory_that_somebody_still_holds_is_found(contract):
    async def scenario(rig):
        kept = rig.receiver.pool[:1]
        with pytest.raises(BufferError):
            rig.receiver.memory.close()
        kept.release()

    contract(scenario)
