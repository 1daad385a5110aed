"""Handing out a region: to whom it was offered, once, and until that writer lets go."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvproto import mapped_host
from kvproto.errors import CarrierUnavailable, ConnectionLost, LeaseError
from kvproto.handshake import canary_bytes
from kvproto.header import HOST_ORDER, ByteOrder
from kvproto.mapped_host import MappedHost
from kvproto.messages import Attached, Commit, Offer, Placed, Prefill, Started
from kvproto.region import NUM_SLOTS, Region
from tests.kvproto.mapped_pair import GEOMETRY, LAYOUT, WAIT_S, Kv, Owner, Writer
from tests.kvproto.mapped_process import STALE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "sockets"


@pytest.fixture
def run(run, until):
    """As ``run``, and every socket, descriptor of memory and mapping is given back at the end."""

    def held() -> tuple[int, int]:
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # of the listing itself
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        maps = Path("/proc/self/maps").read_text("utf-8")
        # uvloop keeps a descriptor of /dev/null in reserve.
        return sum(link != "/dev/null" for link in links), maps.count("memfd:pdserve")

    async def watched(scenario):
        before = held()
        await scenario
        await until(lambda: held() == before)

    return lambda scenario: run(watched(scenario))


class HandWriter(Writer):
    """Answers no OFFER by itself."""

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionLost):
            async for message in self.peer:
                self.messages.put_nowait(message)

    async def take(self, nonce: bytes) -> tuple[bytes, list[int], socket.socket]:
        """What the owner gives for a nonce."""
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, str(self.directory / "d.sock"))
        await loop.sock_sendall(connection, nonce)
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(connection, 100, 4)
            except BlockingIOError:
                await asyncio.sleep(0.002)
                continue
            return data, descriptors, connection


@contextlib.asynccontextmanager
async def offered(directory, name="p"):
    """An owner whose offer is with a writer that has not answered yet."""
    async with Owner(LAYOUT, directory).serving() as owner:
        writer = await HandWriter.dial(owner, name=name)
        attaching = asyncio.create_task(owner.host.attach(await owner.peers.get(), timeout_s=3))
        offer = await writer.message()
        assert isinstance(offer, Offer)
        assert (offer.carrier, len(offer.nonce)) == ("mapped", 32)
        yield owner, writer, offer, attaching
        attaching.cancel()
        await asyncio.wait([attaching])
        await writer.close()


def test_a_writer_attaches_and_lets_go(run, directory):
    async def scenario():
        async with Owner(LAYOUT, directory).serving() as owner:
            writer = await Writer.dial(owner)
            attachment = await owner.host.attach(await owner.peers.get())
            assert (attachment.writer, attachment.is_gone) == ("p", False)
            assert owner.host.stats() == {
                "num_attached": 1,
                "max_attached": NUM_SLOTS,
                "num_offers": 0,
                "num_connections": 1,
            }
            # The end of TCP says nothing about the memory.
            await writer.peer.close()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(attachment.wait_gone(), 0.2)
            writer.attachment.region.put(0, memoryview(b"still"))
            assert owner.region.pool[:5] == b"still"
            writer.attachment.close()
            await asyncio.wait_for(attachment.wait_gone(), WAIT_S)
            await writer.close()
            assert attachment.is_gone
            assert owner.host.stats()["num_attached"] == 0
        assert not (directory / "d.sock").exists()

    run(scenario())


def test_many_writers_one_after_the_other_and_at_once(run, directory):
    async def scenario():
        async with Owner(LAYOUT, directory).serving() as owner:
            for _ in range(3):
                writers = [await Writer.dial(owner, name=f"p{number}") for number in range(4)]
                peers = [await owner.peers.get() for _ in writers]
                attachments = await asyncio.gather(*map(owner.host.attach, peers))
                assert {item.writer for item in attachments} == {"p0", "p1", "p2", "p3"}
                assert len({item.slot_index for item in attachments}) == 4
                for writer in writers:
                    await writer.close()
                for attachment in attachments:
                    await asyncio.wait_for(attachment.wait_gone(), WAIT_S)
            assert owner.host.stats()["num_connections"] == 0

    run(scenario())


def test_a_nonce_that_was_not_offered_is_turned_away(run, directory):
    async def scenario():
        async with offered(directory) as (owner, writer, _, attaching):
            for nonce in (bytes(32), os.urandom(32), b"short"):
                if len(nonce) < 32:
                    connection = socket.socket(socket.AF_UNIX)
                    connection.connect(str(directory / "d.sock"))
                    connection.send(nonce)
                    connection.close()
                    continue
                data, descriptors, connection = await writer.take(nonce)
                assert (data, descriptors) == (b"", [])
                connection.close()
            assert not attaching.done()
            assert owner.host.stats()["num_attached"] == 0

    run(scenario())


def test_a_nonce_is_good_once(run, directory):
    async def scenario():
        async with offered(directory) as (owner, writer, offer, _):
            _, (descriptor,), first = await writer.take(offer.nonce)
            os.close(descriptor)
            data, descriptors, second = await writer.take(offer.nonce)
            assert (data, descriptors) == (b"", [])
            assert owner.host.stats()["num_attached"] == 1
            first.close()
            second.close()

    run(scenario())


def test_a_nonce_dies_with_its_offer(run, directory):
    async def scenario():
        async with offered(directory) as (owner, writer, offer, attaching):
            attaching.cancel()
            await asyncio.wait([attaching])
            data, descriptors, connection = await writer.take(offer.nonce)
            assert (data, descriptors) == (b"", [])
            connection.close()
            # And a late answer is ignored.
            await writer.peer.send(Attached("mapped", offer.nonce))
            assert owner.host.stats()["num_offers"] == 0

    run(scenario())


def test_an_answer_of_another_peer_is_ignored(run, directory):
    async def scenario():
        async with offered(directory) as (owner, writer, offer, attaching):
            thief = await HandWriter.dial(owner, name="q")
            thief_peer = await owner.peers.get()
            owner.host.attached(thief_peer, Attached("mapped", offer.nonce))
            owner.host.attached(thief_peer, Attached("mapped", bytes(32)))
            await asyncio.sleep(0)
            assert not attaching.done()
            await writer.peer.send(Attached("mapped", offer.nonce, "no such memory"))
            with pytest.raises(CarrierUnavailable, match=r"prefill/p@.*cannot attach: no such"):
                await asyncio.wait_for(asyncio.shield(attaching), WAIT_S)
            owner.host.attached(thief_peer, Attached("mapped", offer.nonce))
            await thief.close()

    run(scenario())


def test_a_writer_that_only_says_so_is_not_attached(run, directory):
    async def scenario():
        async with offered(directory) as (_, writer, offer, attaching):
            await writer.peer.send(Attached("mapped", offer.nonce))
            with pytest.raises(CarrierUnavailable, match="says that it attached, and did not"):
                await asyncio.wait_for(asyncio.shield(attaching), WAIT_S)

    run(scenario())


def test_a_writer_that_has_let_go_again_is_not_attached(run, directory, until):
    async def scenario():
        async with offered(directory) as (owner, writer, offer, attaching):
            _, (descriptor,), connection = await writer.take(offer.nonce)
            os.close(descriptor)
            connection.close()
            await until(lambda: owner.host.stats()["num_connections"] == 0)
            await writer.peer.send(Attached("mapped", offer.nonce))
            with pytest.raises(CarrierUnavailable, match="says that it attached, and did not"):
                await asyncio.wait_for(asyncio.shield(attaching), WAIT_S)

    run(scenario())


OTHER_ORDER = ByteOrder.BIG if HOST_ORDER is ByteOrder.LITTLE else ByteOrder.LITTLE
PROOFS = {
    "nothing": (lambda _: b"", "canary"),
    "another byte order": (lambda nonce: canary_bytes(OTHER_ORDER) + nonce, "canary"),
    "another nonce": (lambda _: canary_bytes() + bytes(32), "another nonce"),
}


@pytest.mark.parametrize("fault", PROOFS)
def test_what_the_writer_wrote_must_be_in_our_memory(run, directory, fault):
    async def scenario():
        proof, reason = PROOFS[fault]
        async with offered(directory) as (owner, writer, offer, attaching):
            data, (descriptor,), connection = await writer.take(offer.nonce)
            raw = proof(offer.nonce)
            os.pwrite(descriptor, raw, 4096 + 128 * int.from_bytes(data, "little"))
            os.close(descriptor)
            await writer.peer.send(Attached("mapped", offer.nonce))
            with pytest.raises(CarrierUnavailable, match=reason):
                await asyncio.wait_for(asyncio.shield(attaching), WAIT_S)
            # It has the memory all the same, until it lets go.
            assert owner.host.stats()["num_attached"] == 1
            connection.close()

    run(scenario())


def test_a_writer_that_does_not_answer_is_not_waited_for(run, directory):
    async def scenario():
        async with Owner(LAYOUT, directory).serving() as owner:
            writer = await HandWriter.dial(owner)
            with pytest.raises(CarrierUnavailable, match=r"did not answer .* within 0\.1 s"):
                await owner.host.attach(await owner.peers.get(), timeout_s=0.1)
            assert owner.host.stats()["num_offers"] == 0
            await writer.close()

    run(scenario())


def test_a_process_that_says_nothing_is_cut_off(run, directory, monkeypatch):
    monkeypatch.setattr(mapped_host, "ATTACH_TIMEOUT_S", 0.05)

    async def scenario():
        async with Owner(LAYOUT, directory).serving():
            reader, writer = await asyncio.open_unix_connection(str(directory / "d.sock"))
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
            await writer.wait_closed()

    run(scenario())


def test_another_user_is_turned_away(run, directory, monkeypatch):
    monkeypatch.setattr(mapped_host, "peer_uid", lambda _: 12345)

    async def scenario():
        async with offered(directory) as (owner, writer, offer, _):
            data, descriptors, connection = await writer.take(offer.nonce)
            assert (data, descriptors) == (b"", [])
            assert owner.host.stats()["num_attached"] == 0
            connection.close()

    run(scenario())


def test_slots_and_connections_are_bounded(run, directory, monkeypatch):
    monkeypatch.setattr(mapped_host, "NUM_SLOTS", 1)

    async def scenario():
        async with Owner(LAYOUT, directory).serving() as owner:
            writer = await Writer.dial(owner)
            peer = await owner.peers.get()
            attachment = await owner.host.attach(peer)
            with pytest.raises(CarrierUnavailable, match="1 writers are attached, the limit"):
                await owner.host.attach(peer)
            reader, stream = await asyncio.open_unix_connection(str(directory / "d.sock"))
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            stream.close()
            await stream.wait_closed()
            await writer.close()
            await asyncio.wait_for(attachment.wait_gone(), WAIT_S)
            second = await Writer.dial(owner)
            assert (await owner.host.attach(await owner.peers.get())).slot_index == 0
            await second.close()

    run(scenario())


def test_what_a_writer_says_on_the_unix_connection_changes_nothing(run, directory):
    async def scenario():
        async with Owner(LAYOUT, directory).serving() as owner:
            writer = await Writer.dial(owner)
            attachment = await owner.host.attach(await owner.peers.get())
            writer.attachment._connection.send(b"anything" * 100)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(attachment.wait_gone(), 0.1)
            await writer.close()
            await asyncio.wait_for(attachment.wait_gone(), WAIT_S)

    run(scenario())


async def test_a_name_that_is_taken_is_an_error(directory):
    region = Region.create(LAYOUT, "d")
    host = await MappedHost.start(region, directory)
    with pytest.raises(CarrierUnavailable, match="another process serves under this"):
        await MappedHost.start(region, directory)
    await host.close()
    await host.close()
    again = await MappedHost.start(region, directory)
    await again.close()
    assert region.close()


async def test_refused_connections_of_the_system_end_nothing(directory, monkeypatch):
    """No descriptor left, say; the next writer is served."""
    region = Region.create(LAYOUT, "d")
    loop = asyncio.get_running_loop()
    accept, answers = loop.sock_accept, [OSError(24, "Too many open files")]

    async def failing(listener):
        if answers:
            raise answers.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", failing)
    monkeypatch.setattr(mapped_host, "_ACCEPT_PAUSE_S", 0.001)
    host = await MappedHost.start(region, directory)
    reader, writer = await asyncio.open_unix_connection(str(directory / "d.sock"))
    writer.write(bytes(32))
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    await writer.wait_closed()
    assert not answers
    await host.close()
    region.close()


# -- writers in processes of their own -------------------------------------------------------------


@contextlib.asynccontextmanager
async def attached_process(directory: Path, mode: str):
    """An owner, and a writer process that is attached to it: (owner, child, peer, attachment)."""
    async with Owner(LAYOUT, directory).serving() as owner:
        child = spawn(owner, mode)
        try:
            peer = await asyncio.wait_for(owner.peers.get(), 2 * WAIT_S)
            yield owner, child, peer, await owner.host.attach(peer)
        finally:
            child.kill()
            child.wait(WAIT_S)


def spawn(owner: Owner, mode: str) -> "subprocess.Popen[bytes]":
    module = [sys.executable, "-m", "tests.kvproto.mapped_process"]
    return subprocess.Popen([*module, str(owner.port), str(owner.directory), mode], cwd=ROOT)


async def ask(owner, peer, num_tokens):
    sequence_id, generation, table = owner.grant(num_tokens)
    await peer.send(
        Prefill(
            sequence_id,
            generation,
            tokens=[1] * num_tokens,
            timeout_s=WAIT_S,
            carrier="mapped",
            block_table=table,
        )
    )
    return sequence_id, generation, table


def test_two_processes_hand_over(run, directory):
    async def scenario():
        async with attached_process(directory, "once") as (owner, child, peer, attachment):
            for num_tokens in (1, 4, 13, 30):
                sequence_id, generation, table = await ask(owner, peer, num_tokens)
                while not isinstance(letter := await owner.letter(sequence_id, generation), Commit):
                    assert isinstance(letter, Placed)
                owner.leases.commit(letter)
                kv = Kv(GEOMETRY, num_tokens, seed=generation)
                assert kv.in_pool(LAYOUT, owner.region.pool, table)
                owner.blocks.free(table, sequence_id)
            assert not attachment.is_gone
            await peer.close()
            await asyncio.wait_for(attachment.wait_gone(), WAIT_S)
            assert child.wait(WAIT_S) == 0

    run(scenario())


def test_a_killed_writer_is_gone_and_only_then_its_blocks_are_free(run, directory):
    async def scenario():
        async with attached_process(directory, "endless") as (owner, child, peer, attachment):
            sequence_id, generation, table = await ask(owner, peer, 16)
            assert isinstance(await owner.letter(sequence_id, generation), Started)
            owner.leases.revoke(generation)
            peer.abort("cut by the test")
            await peer.wait_closed()
            # It writes on: nothing of TCP stops it.
            offset = LAYOUT.pieces(0, table, 0, 1)[0][0][0]
            for _ in range(3):
                owner.region.pool[offset] = 0
                async with asyncio.timeout(WAIT_S):
                    while owner.region.pool[offset] != STALE:
                        await asyncio.sleep(0.001)
            assert not attachment.is_gone
            assert owner.blocks.num_free_blocks == LAYOUT.num_blocks - len(table)
            child.kill()
            await asyncio.wait_for(attachment.wait_gone(), WAIT_S)
            assert owner.leases.release(generation) == table
            owner.region.pool[:] = bytes(LAYOUT.nbytes)
            child.wait(WAIT_S)
            assert not any(owner.region.pool)

    run(scenario())


def test_a_stopped_writer_keeps_its_blocks(run, directory):
    async def scenario():
        async with attached_process(directory, "endless") as (owner, child, peer, attachment):
            sequence_id, generation, table = await ask(owner, peer, 16)
            assert isinstance(await owner.letter(sequence_id, generation), Started)
            child.send_signal(signal.SIGSTOP)
            owner.leases.revoke(generation)
            peer.abort("cut by the test")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(attachment.wait_gone(), 0.3)
            assert owner.blocks.stats()["quarantined"] == len(table)
            with pytest.raises(LeaseError):
                owner.leases.placed(Placed(sequence_id, generation, "layers.0", 0, 1), "p")
            # It wakes up and goes on; nobody else has its blocks.
            owner.region.pool[:] = bytes(LAYOUT.nbytes)
            child.send_signal(signal.SIGCONT)
            offset = LAYOUT.pieces(0, table, 0, 1)[0][0][0]
            async with asyncio.timeout(WAIT_S):
                while owner.region.pool[offset] != STALE:
                    await asyncio.sleep(0.001)
            child.kill()
            await asyncio.wait_for(attachment.wait_gone(), WAIT_S)
            assert owner.leases.release(generation) == table

    run(scenario())


def test_a_killed_owner_leaves_a_socket_that_the_next_one_removes(directory):
    program = f"""
import asyncio, os
from pathlib import Path
from kvproto.mapped_host import MappedHost
from kvproto.region import Region
from tests.kvproto.mapped_pair import LAYOUT
async def main():
    await MappedHost.start(Region.create(LAYOUT, "d"), Path({str(directory)!r}))
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=50, check=False)
    assert finished.returncode == -signal.SIGKILL
    assert (directory / "d.sock").is_socket()

    async def again():
        region = Region.create(LAYOUT, "d")
        host = await MappedHost.start(region, directory)
        _, writer = await asyncio.open_unix_connection(str(directory / "d.sock"))
        writer.close()
        await writer.wait_closed()
        await host.close()
        assert region.close()

    asyncio.run(again())
    assert os.listdir(directory) == []
