"""The writer's side: attaching by its own means only, and writing nothing without permission."""

import asyncio
import os
import socket
import threading
from dataclasses import replace

import pytest

from kvproto import mapped
from kvproto.digest import RegionDigests
from kvproto.errors import CarrierUnavailable, ConnectionLost, LeaseError, LocalProtocolError
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.mapped import MappedWriter, attach
from kvproto.messages import Commit, Offer, Placed
from kvproto.region import Region
from kvproto.socket_directory import SocketDirectory
from tests.kvproto.mapped_pair import (
    GEOMETRY,
    LAYOUT,
    WAIT_S,
    Kv,
    Owner,
    Writer,
    attached_pair,
    transfer,
)

LARGE = KvGeometry.uniform(1, 8, 128, "float16", ("layers.0",))  # 4 KiB a token
LARGE_LAYOUT = PoolLayout(LARGE, 40, 64)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "sockets"


# -- attaching -------------------------------------------------------------------------------------


async def refused(directory, reason, **settings):
    num_descriptors = len(os.listdir("/proc/self/fd"))
    owner = settings.pop("owner", "d")
    with pytest.raises(CarrierUnavailable, match=reason):
        await attach(owner, bytes(32), GEOMETRY, directory=directory, timeout_s=2, **settings)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


async def test_without_an_owner_here_there_is_no_mapped_memory(directory):
    await refused(directory, "No such file or directory")
    directory.mkdir(mode=0o700)
    await refused(directory, "no owner listens as d.sock .* another host or in another container")
    await refused(directory, "cannot name a socket", owner="../d")
    directory.chmod(0o755)
    await refused(directory, "others may enter it")


async def test_a_file_or_a_link_in_place_of_the_socket_is_refused(directory, tmp_path):
    directory.mkdir(mode=0o700)
    (directory / "d.sock").write_bytes(b"")
    await refused(directory, "no owner listens")
    (directory / "d.sock").unlink()
    (directory / "d.sock").symlink_to(tmp_path / "nowhere")
    await refused(directory, "no owner listens")


@pytest.mark.parametrize("answer", ["nothing", "silence", "no descriptor", "two descriptors"])
async def test_an_owner_that_does_not_pass_its_memory(directory, answer, monkeypatch):
    opened = SocketDirectory.open(directory, is_owner=True)
    with opened.listen("d") as listener:
        opened.close()
        loop = asyncio.get_running_loop()
        kept = []

        async def serve():
            connection, _ = await loop.sock_accept(listener)
            kept.append(connection)
            if answer == "silence":
                return
            assert await loop.sock_recv(connection, 32) == bytes(32)
            if answer == "no descriptor":
                connection.send(bytes(4))
            if answer == "two descriptors":
                socket.send_fds(connection, [bytes(4)], [connection.fileno()] * 2)
            connection.close()

        serving = asyncio.create_task(serve())
        reason = "within 0.2 s" if answer == "silence" else "did not pass its memory"
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(CarrierUnavailable, match=reason):
            await attach("d", bytes(32), GEOMETRY, directory=directory, timeout_s=0.2)
        await serving
        for connection in kept:
            connection.close()
        assert len(os.listdir("/proc/self/fd")) == before


async def test_an_owner_of_another_user_is_refused(directory, monkeypatch):
    opened = SocketDirectory.open(directory, is_owner=True)
    with opened.listen("d"):
        opened.close()
        monkeypatch.setattr(mapped, "peer_uid", lambda _: 12345)
        await refused(directory, "runs as uid 12345")


async def test_an_owner_that_resets_the_connection(directory, monkeypatch):
    opened = SocketDirectory.open(directory, is_owner=True)
    with opened.listen("d"):
        opened.close()

        def reset(*_):
            raise ConnectionResetError(104, "Connection reset by peer")

        monkeypatch.setattr(socket, "recv_fds", reset)
        monkeypatch.setattr(mapped, "_wait_readable", lambda *_: asyncio.sleep(0))
        await refused(directory, "cut the connection.*reset by peer")


def test_the_reason_goes_to_the_owner_and_both_use_tcp(run, directory, tmp_path):
    async def scenario():
        async with Owner(LAYOUT, directory).serving() as owner:
            elsewhere = tmp_path / "elsewhere"
            writer = await Writer.dial(owner, directory=elsewhere)
            with pytest.raises(CarrierUnavailable, match=r"cannot attach: cannot open .*elsewhere"):
                await owner.host.attach(await owner.peers.get())
            assert writer.attachment is None
            await writer.close()
            other = KvGeometry.uniform(1, 1, 4, "float32", ("a",))
            writer = await Writer.dial(owner, geometry=other, name="q")
            with pytest.raises(CarrierUnavailable, match=r"cannot attach: .* has regions_digest"):
                await owner.host.attach(await owner.peers.get())
            assert writer.attachment is None
            await writer.close()

    run(scenario())


def test_an_offer_of_another_carrier_is_declined(run, directory):
    async def scenario():
        async with Owner(LAYOUT, directory).serving() as owner:
            writer = await Writer.dial(owner)
            peer = await owner.peers.get()
            sent = []
            owner.host.attached = lambda _, message: sent.append(message)
            await peer.send(Offer("rdma", bytes(32)))
            async with asyncio.timeout(WAIT_S):
                while not sent:
                    await asyncio.sleep(0.002)
            assert sent[0].reason == "this side has no carrier 'rdma'"
            await writer.close()

    run(scenario())


async def test_nothing_stays_mapped_if_the_answer_cannot_be_sent(directory):
    async with Owner(LAYOUT, directory).serving() as owner:
        writer = await Writer.dial(owner)
        peer = await owner.peers.get()
        attach_writer = mapped.attach

        async def attach_and_lose(*arguments, **settings):
            attachment = await attach_writer(*arguments, **settings)
            writer.peer.abort("lost by the test")
            return attachment

        mapped.attach = attach_and_lose
        try:
            attaching = asyncio.create_task(owner.host.attach(peer, timeout_s=0.5))
            await asyncio.wait_for(writer._reading, WAIT_S)
        finally:
            mapped.attach = attach_writer
        with pytest.raises(CarrierUnavailable):
            await attaching
        assert writer.attachment is None
        async with asyncio.timeout(WAIT_S):
            while owner.host.stats()["num_connections"]:
                await asyncio.sleep(0.002)


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64])
def test_transfers_are_whole(run, directory, chunk_tokens):
    """Windows, states, scattered blocks, chunks that end inside blocks; both ways to copy."""

    async def scenario():
        for thread_min_nbytes in (0, 1 << 30):
            async with attached_pair(directory, thread_min_nbytes=thread_min_nbytes) as pair:
                owner, writer, mapped_writer = pair
                taken = owner.blocks.allocate("elsewhere", 16)
                owner.blocks.free([taken[i] for i in (9, 2, 14, 5, 6, 0, 11, 3)], "elsewhere")
                for num_tokens in (1, 2, 5, 6, 29):
                    kv = Kv(GEOMETRY, num_tokens, seed=num_tokens)
                    table = await transfer(owner, writer, mapped_writer, kv, chunk_tokens)
                    assert kv.in_pool(LAYOUT, owner.region.pool, table)
                    owner.blocks.free(table, f"s{_last(owner)}")

    run(scenario())


def _last(owner):
    return max(generation for _, generation in owner.letters)


def test_buffers_may_be_cut_anywhere_and_be_constant(run, directory):
    async def scenario():
        async with attached_pair(directory) as (owner, writer, mapped_writer):
            kv = Kv(GEOMETRY, 8, seed=1)
            sequence_id, generation, table = owner.grant(8)
            mapped_writer.begin(sequence_id, generation, table, 8)
            for layer, first in enumerate(kv.first):
                body = b"".join(kv.pieces(layer, first, 8 - first))
                cuts = [body[start : start + 37] for start in range(0, len(body), 37)]
                views = [memoryview(cut) for cut in cuts]
                await mapped_writer.write(
                    sequence_id, generation, layer, first, 8 - first, [*views, memoryview(b"")]
                )
            await mapped_writer.flush()
            assert kv.in_pool(LAYOUT, owner.region.pool, table)
            await writer.peer.send(kv.commit(sequence_id, generation))
            while not isinstance(letter := await owner.letter(sequence_id, generation), Commit):
                assert isinstance(letter, Placed)
            owner.leases.commit(letter)

    run(scenario())


def test_a_checked_write_is_announced_in_parts_and_an_unchecked_one_whole(run, directory):
    async def scenario():
        async with attached_pair(directory, LARGE_LAYOUT) as (owner, _, mapped_writer):
            kv = Kv(LARGE, 2500, seed=2)
            for is_checked, counts in ((True, [2048, 452]), (False, [2500])):
                sequence_id, generation, table = owner.grant(2500, is_checked=is_checked)
                mapped_writer.begin(sequence_id, generation, table, 2500, is_checked=is_checked)
                await mapped_writer.write(
                    sequence_id, generation, 0, 0, 2500, kv.pieces(0, 0, 2500)
                )
                placed = [await owner.letter(sequence_id, generation) for _ in counts]
                assert [item.num_tokens for item in placed] == counts
                commit = kv.commit(sequence_id, generation)
                owner.leases.commit(commit if is_checked else replace(commit, digests=[]))
                assert kv.in_pool(LARGE_LAYOUT, owner.region.pool, table)
                owner.blocks.free(table, sequence_id)

    run(scenario())


BAD_TABLES = {
    "a block beyond the region": ([0, 16], 8, r"blocks 0\.\.16, the region has 16"),
    "a far block": ([4_000_000_000, 1], 8, "the region has 16"),
    "a negative block": ([-1, 1], 8, "the region has 16"),
    "a block twice": ([3, 3], 8, "names a block twice"),
    "too few blocks": ([0, 1], 9, "9 tokens do not fit into 2 blocks"),
    "no blocks": ([], 1, "1 tokens do not fit into 0 blocks"),
    "no tokens": ([0], 0, "0 tokens do not fit"),
}


@pytest.mark.parametrize("fault", BAD_TABLES)
def test_a_block_table_that_does_not_fit_is_refused(run, directory, fault):
    async def scenario():
        table, num_tokens, reason = BAD_TABLES[fault]
        async with attached_pair(directory) as (owner, _, mapped_writer):
            with pytest.raises(LeaseError, match=reason) as excinfo:
                mapped_writer.begin("s", 1, table, num_tokens)
            assert excinfo.value.sequence_id == "s"
            with pytest.raises(LocalProtocolError, match="generation 1 is not begun"):
                await mapped_writer.write("s", 1, 0, 0, 1, [memoryview(bytes(128))])
            assert not any(owner.region.pool)

    run(scenario())


# Layer, first token, number of tokens, bytes: of a transfer of 8 tokens, 4 of layer 0 written.
BAD_WRITES = {
    "unknown layer": (3, 0, 1, 128, "no layer 3"),
    "negative layer": (-1, 0, 1, 128, "no layer -1"),
    "duplicate": (0, 0, 4, 512, "next token is 4 of 8"),
    "overlap": (0, 3, 2, 256, "next token is 4"),
    "gap": (0, 5, 1, 128, "next token is 4"),
    "beyond the end": (0, 4, 5, 640, "next token is 4 of 8"),
    "no tokens": (0, 4, 0, 0, "next token is 4"),
    "before the window": (1, 0, 8, 768, "next token is 3"),
    "too few bytes": (0, 4, 4, 511, "have 511 bytes, its regions have 512"),
    "too many bytes": (0, 4, 4, 513, "have 513 bytes"),
    "a state too early": (2, 7, 1, 0, "have 0 bytes, its regions have 160"),
}


@pytest.mark.parametrize("fault", BAD_WRITES)
def test_writes_without_permission_change_nothing(run, directory, fault):
    async def scenario():
        layer, first, count, nbytes, reason = BAD_WRITES[fault]
        async with attached_pair(directory) as (owner, _, mapped_writer):
            sequence_id, generation, table = owner.grant(8)
            mapped_writer.begin(sequence_id, generation, table, 8)
            with pytest.raises(LeaseError, match="is being written already"):
                mapped_writer.begin(sequence_id, generation, table, 8)
            body = [memoryview(bytes([7]) * 512)]
            await mapped_writer.write(sequence_id, generation, 0, 0, 4, body)
            before = bytes(owner.region.pool)
            with pytest.raises(LocalProtocolError, match=reason):
                await mapped_writer.write(
                    sequence_id, generation, layer, first, count, [memoryview(bytes([9]) * nbytes)]
                )
            assert owner.region.pool == before
            await mapped_writer.write(sequence_id, generation, 0, 4, 4, body)

    run(scenario())


def test_after_its_end_nothing_of_a_transfer_is_written(run, directory):
    async def scenario():
        async with attached_pair(directory) as (owner, _, mapped_writer):
            sequence_id, generation, table = owner.grant(8)
            mapped_writer.begin(sequence_id, generation, table, 8)
            mapped_writer.end(sequence_id, generation)
            mapped_writer.end(sequence_id, generation)
            with pytest.raises(LocalProtocolError, match="is not begun"):
                await mapped_writer.write(
                    sequence_id, generation, 0, 0, 8, [memoryview(bytes([9]) * 1024)]
                )
            assert not any(owner.region.pool)

    run(scenario())


class HeldRegion:
    """In place of a region: the copy of piece number ``at`` waits until it may go on."""

    def __init__(self, region, at: int) -> None:
        self._region, self._at = region, at
        self.num_put = 0
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def put(self, offset, source) -> None:
        if self.num_put == self._at:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
        self.num_put += 1
        self._region.put(offset, source)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(mapped, "PIECE_NBYTES", 512 * 1024)
    monkeypatch.setattr(mapped, "MAX_QUEUED_NBYTES", 4 * 1024 * 1024)


async def begun(owner, mapped_writer):
    """A write of 4 MiB, queued, and held at its third piece of 512 KiB."""
    sequence_id, generation, table = owner.grant(1024)
    mapped_writer.begin(sequence_id, generation, table, 1024)
    held = mapped_writer._region = HeldRegion(mapped_writer._region, at=2)
    kv = Kv(LARGE, 1024, seed=3)
    await mapped_writer.write(sequence_id, generation, 0, 0, 1024, kv.pieces(0, 0, 1024))
    await asyncio.to_thread(held.reached.wait, WAIT_S)
    return sequence_id, generation, held


def second_write(owner, mapped_writer):
    """One more write, for which there is no room yet."""
    sequence_id, generation, table = owner.grant(512)
    mapped_writer.begin(sequence_id, generation, table, 512)
    pieces = Kv(LARGE, 512, seed=4).pieces(0, 0, 512)
    return (
        sequence_id,
        generation,
        asyncio.create_task(mapped_writer.write(sequence_id, generation, 0, 0, 512, pieces)),
    )


async def waits(*tasks) -> bool:
    """None of them ends by itself."""
    done, _ = await asyncio.wait(tasks, timeout=0.1)
    return not done


def test_an_abort_stops_a_copy_that_is_under_way(run, directory, small_pieces):
    """And flush, behind which ABORT_ACK may be sent, waits for it."""

    async def scenario():
        async with attached_pair(directory, LARGE_LAYOUT) as (owner, _, mapped_writer):
            sequence_id, generation, held = await begun(owner, mapped_writer)
            mapped_writer.end(sequence_id, generation)
            flushing = asyncio.create_task(mapped_writer.flush())
            assert await waits(flushing)
            held.go_on.set()
            await asyncio.wait_for(flushing, WAIT_S)
            assert held.num_put == 3  # of 8
            assert owner.leases.landed_nbytes(generation) == 0
            assert (sequence_id, generation) not in owner.letters

    run(scenario())


def test_writes_wait_for_room_and_go_on(run, directory, small_pieces):
    async def scenario():
        async with attached_pair(directory, LARGE_LAYOUT) as (owner, _, mapped_writer):
            first = await begun(owner, mapped_writer)
            *second, writing = second_write(owner, mapped_writer)
            flushing = asyncio.create_task(mapped_writer.flush())
            assert await waits(flushing, writing)
            first[2].go_on.set()
            async with asyncio.timeout(WAIT_S):
                await flushing
                await writing
                await mapped_writer.flush()
            for key in (first[:2], second):
                assert isinstance(await owner.letter(*key), Placed)

    run(scenario())


def test_a_cancelled_write_ends_its_transfer_alone(run, directory, small_pieces):
    async def scenario():
        async with attached_pair(directory, LARGE_LAYOUT) as (owner, _, mapped_writer):
            sequence_id, generation, held = await begun(owner, mapped_writer)
            *second, writing = second_write(owner, mapped_writer)
            assert await waits(writing)
            writing.cancel()
            await asyncio.wait([writing])
            with pytest.raises(LocalProtocolError, match="is not begun"):
                await mapped_writer.write(*second, 0, 0, 1, [])
            held.go_on.set()
            await mapped_writer.flush()
            assert held.num_put == 8
            assert isinstance(await owner.letter(sequence_id, generation), Placed)

    run(scenario())


def test_close_waits_for_a_copy_and_tells_the_owner(run, directory, small_pieces):
    async def scenario():
        async with attached_pair(directory, LARGE_LAYOUT) as (owner, _, mapped_writer):
            sequence_id, generation, held = await begun(owner, mapped_writer)
            *_, writing = second_write(owner, mapped_writer)
            flushing = asyncio.create_task(mapped_writer.flush())
            assert await waits(flushing)
            closing = asyncio.create_task(mapped_writer.close())
            assert await waits(closing, flushing)
            assert owner.host.stats()["num_attached"] == 1
            held.go_on.set()
            async with asyncio.timeout(WAIT_S):
                await closing
                for task in (flushing, writing):
                    with pytest.raises(ConnectionLost, match="detached"):
                        await task
                while owner.host.stats()["num_attached"]:
                    await asyncio.sleep(0.002)
            assert held.num_put == 3
            with pytest.raises(ConnectionLost, match="detached"):
                await mapped_writer.write(sequence_id, generation, 0, 0, 1, [])
            await mapped_writer.close()

    run(scenario())


def test_a_connection_that_is_lost_meanwhile_ends_what_is_queued(run, directory, small_pieces):
    async def scenario():
        async with attached_pair(directory, LARGE_LAYOUT) as (owner, writer, mapped_writer):
            sequence_id, generation, held = await begun(owner, mapped_writer)
            writer.peer.abort("lost by the test")
            held.go_on.set()
            with pytest.raises(ConnectionLost, match="lost by the test"):
                await asyncio.wait_for(mapped_writer.flush(), WAIT_S)
            with pytest.raises(ConnectionLost, match="lost by the test"):
                await mapped_writer.write(sequence_id, generation, 0, 0, 1, [])

    run(scenario())


def test_a_copy_that_fails_is_no_success(run, directory, small_pieces):
    async def scenario():
        async with attached_pair(directory, LARGE_LAYOUT) as (owner, _, mapped_writer):
            sequence_id, generation, held = await begun(owner, mapped_writer)
            del held._region  # AttributeError in the thread
            held.go_on.set()
            with pytest.raises(ConnectionLost, match="writing to mapped memory failed"):
                await asyncio.wait_for(mapped_writer.flush(), WAIT_S)
            assert isinstance(mapped_writer._sending.exception(), AttributeError)
            assert (sequence_id, generation) not in owner.letters

    run(scenario())


def test_a_region_is_not_unmapped_under_a_copy(directory):
    """Even if somebody closes the attachment itself."""
    region = Region.create(LARGE_LAYOUT, "d")
    foreign = mapped.ForeignRegion.map(region.fd, LARGE, "d")
    source = memoryview(bytearray(LARGE_LAYOUT.nbytes))
    stop, failures = threading.Event(), []

    def copy() -> None:
        while not stop.is_set():
            try:
                foreign.put(0, source)
            except LocalProtocolError as exc:
                failures.append(exc)
                return

    thread = threading.Thread(target=copy)
    thread.start()
    num_refused = 0
    for _ in range(10_000):
        try:
            foreign.close()
            break
        except BufferError:
            num_refused += 1
    stop.set()
    thread.join(WAIT_S)
    foreign.close()
    assert failures or num_refused >= 0
    source.release()
    assert region.close()


def test_concurrent_writes_do_not_mix(run, directory):
    async def scenario():
        async with attached_pair(directory, thread_min_nbytes=0) as (owner, writer, mapped_writer):
            kvs = [Kv(GEOMETRY, 4, seed=number) for number in range(8)]
            tables = await asyncio.gather(
                *(transfer(owner, writer, mapped_writer, kv, 1 + n % 3) for n, kv in enumerate(kvs))
            )
            for kv, table in zip(kvs, tables, strict=True):
                assert kv.in_pool(LAYOUT, owner.region.pool, table)

    run(scenario())


def test_a_lost_connection_ends_a_write(run, directory):
    async def scenario():
        async with attached_pair(directory) as (owner, writer, mapped_writer):
            sequence_id, generation, table = owner.grant(8)
            mapped_writer.begin(sequence_id, generation, table, 8)
            writer.peer.abort("lost by the test")
            with pytest.raises(ConnectionLost):
                await mapped_writer.write(
                    sequence_id, generation, 0, 0, 8, [memoryview(bytes(1024))]
                )
            with pytest.raises(ConnectionLost):
                await mapped_writer.flush()

    run(scenario())


def test_digests_are_those_of_the_bytes(run, directory):
    async def scenario():
        async with attached_pair(directory, LARGE_LAYOUT) as (owner, _, mapped_writer):
            assert isinstance(mapped_writer, MappedWriter)
            kv = Kv(LARGE, 1500, seed=4)
            sequence_id, generation, table = owner.grant(1500)
            mapped_writer.begin(sequence_id, generation, table, 1500)
            digests = RegionDigests(LARGE)
            await mapped_writer.write(
                sequence_id, generation, 0, 0, 1500, kv.pieces(0, 0, 1500), digests
            )
            await mapped_writer.flush()
            assert digests.values() == kv.digests()
            assert isinstance(await owner.letter(sequence_id, generation), Placed)
            owner.leases.commit(kv.commit(sequence_id, generation))

    run(scenario())
