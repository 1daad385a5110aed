"""Proving and measuring a path, over every carrier."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from kvproto import probe as probe_module
from kvproto.errors import CarrierLost, ConnectionLost, ErrorCode, LeaseError, PoolExhausted
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.messages import Abort, AbortAck, Commit, CommitAck, Probe
from kvproto.probe import (
    MAX_PROBE_NBYTES,
    PathReport,
    ProbeFailed,
    answer_probe,
    max_probe_tokens,
    measure,
)
from kvproto.tcp import TcpWriter
from tests.kvproto.mapped_pair import GEOMETRY, LAYOUT, WAIT_S, Owner, attached_pair

LARGE = KvGeometry.uniform(4, 8, 128, "float16", tuple("abcd"))  # 16 KiB a token
LARGE_LAYOUT = PoolLayout(LARGE, 512, 16)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "sockets"


async def answering(writer, mapped_writer, geometry, change=lambda commit: commit):
    """The writer's side as a prefill worker has it."""
    peer = writer.peer
    while True:
        message = await writer.messages.get()
        if isinstance(message, Probe):
            key = (message.sequence_id, message.generation)
            is_mapped = message.carrier == "mapped"
            if is_mapped:
                mapped_writer.begin(*key, message.block_table, message.num_tokens)
            write_with = mapped_writer if is_mapped else TcpWriter(peer, geometry)
            await answer_probe(ChangingPeer(peer, change), write_with, geometry, message)
            mapped_writer.end(*key)
        elif isinstance(message, Abort):
            await peer.send(AbortAck(message.sequence_id, message.generation))


class ChangingPeer:
    """Changes COMMIT on its way out."""

    def __init__(self, peer, change) -> None:
        self._peer, self._change = peer, change

    async def send(self, message) -> None:
        if (changed := self._change(message)) is not None:
            await self._peer.send(changed)


def measuring(owner: Owner, peer, carrier: str, **settings):
    arguments = {
        "carrier": carrier,
        "attachment": owner.attachment if carrier == "mapped" else None,
        "sequence_id": "probe",
        "new_generation": lambda: next(owner.generations),
        "open_letters": lambda *key: commits(owner, *key),
        "timeout_s": WAIT_S,
    }
    return measure(peer, owner.leases, owner.blocks, owner.layout, **(arguments | settings))


@contextlib.asynccontextmanager
async def commits(owner, sequence_id, generation):
    """Letters without WRITE and PLACED, as a worker routes them."""
    async with owner.open_letters(sequence_id, generation) as next_letter:

        async def next_control(timeout_s):
            while type(letter := await next_letter(timeout_s)).__name__ in {"Write", "Placed"}:
                pass
            return letter

        yield next_control


@contextlib.asynccontextmanager
async def probed(directory, layout=LAYOUT, change=lambda commit: commit):
    async with attached_pair(directory, layout) as (owner, writer, mapped_writer):
        task = asyncio.create_task(answering(writer, mapped_writer, layout.geometry, change))
        try:
            yield owner, owner.peer
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()


@pytest.mark.parametrize("carrier", ["", "mapped"])
@pytest.mark.parametrize("layout", [LAYOUT, LARGE_LAYOUT], ids=["small", "large"])
def test_a_path_is_measured_and_everything_given_back(run, directory, carrier, layout):
    async def scenario():
        async with probed(directory, layout) as (owner, peer):
            report = await measuring(owner, peer, carrier)
            num_tokens = max_probe_tokens(layout, layout.num_blocks)
            assert report.carrier == carrier
            assert report.nbytes == layout.geometry.prompt_nbytes(num_tokens)
            assert report.fixed_nbytes == layout.geometry.prompt_nbytes(1)
            assert report.elapsed_s >= 0 <= report.fixed_s
            assert owner.blocks.num_free_blocks == layout.num_blocks
            assert owner.leases.stats()["num_leases"] == 0
            assert any(owner.region.pool)

    run(scenario())


def test_the_size_of_a_probe():
    assert max_probe_tokens(LARGE_LAYOUT, 512) == MAX_PROBE_NBYTES // LARGE.prompt_nbytes(1)
    assert max_probe_tokens(LARGE_LAYOUT, 9) == 2 * 16
    assert max_probe_tokens(LARGE_LAYOUT, 3) == 0
    assert max_probe_tokens(LAYOUT, 16) == 16
    state = KvGeometry(
        (replace(GEOMETRY.layers[2], regions=(replace(GEOMETRY.layers[2].regions[0]),)),), "float32"
    )
    assert max_probe_tokens(PoolLayout(state, 8, 4), 8) == 8
    huge = KvGeometry.uniform(600, 64, 256, "float16", tuple(f"l{n}" for n in range(600)))
    assert huge.prompt_nbytes(1) > MAX_PROBE_NBYTES
    assert max_probe_tokens(PoolLayout(huge, 8, 4), 8) == 0


def test_a_report_says_bytes_per_second_of_what_is_more():
    assert PathReport("tcp", 1100, 2.0, 1.0, 100).bandwidth == 1000
    assert PathReport("tcp", 1100, 1.0, 1.0, 100).bandwidth == 0.0


def test_without_free_blocks_nothing_is_measured(run, directory):
    async def scenario():
        async with probed(directory) as (owner, peer):
            owner.blocks.allocate("busy", 13)
            with pytest.raises(PoolExhausted, match="no probe over mapped: 3 blocks are free"):
                await measuring(owner, peer, "mapped")
            assert owner.blocks.num_free_blocks == 3

    run(scenario())


def test_a_grant_that_is_refused_gives_its_blocks_back(run, directory):
    async def scenario():
        async with probed(directory) as (owner, peer):
            owner.leases._max_leases = 0
            with pytest.raises(Exception, match="the limit"):
                await measuring(owner, peer, "mapped")
            assert owner.blocks.num_free_blocks == LAYOUT.num_blocks

    run(scenario())


@pytest.mark.parametrize("carrier", ["", "mapped"])
def test_bytes_that_are_not_those_sent_are_found(run, directory, carrier):
    def damage(message):
        if isinstance(message, Commit):
            return replace(message, digests=[digest ^ 1 for digest in message.digests])
        return message

    async def scenario():
        async with probed(directory, change=damage) as (owner, peer):
            with pytest.raises(ProbeFailed, match="is not proven: region k of layer") as excinfo:
                await measuring(owner, peer, carrier)
            assert excinfo.value.code == ErrorCode.DIGEST_MISMATCH
            assert excinfo.value.generation == 0
            assert owner.blocks.num_free_blocks == LAYOUT.num_blocks

    run(scenario())


def test_without_a_commit_the_writer_is_asked_to_stop(run, directory):
    async def scenario():
        async with probed(directory, change=lambda _: None) as (owner, peer):
            with pytest.raises(ProbeFailed, match=r"no COMMIT came within 0\.2 s") as excinfo:
                await measuring(owner, peer, "mapped", timeout_s=0.2)
            assert excinfo.value.code == ErrorCode.DEADLINE_EXCEEDED
            assert excinfo.value.generation == 0
            assert owner.blocks.num_free_blocks == LAYOUT.num_blocks

    run(scenario())


@pytest.mark.parametrize(
    ("letters", "reason", "is_quiet"),
    [
        ([Abort("probe", 1, 5, "too much to do"), AbortAck("probe", 1)], "too much to do", True),
        ([AbortAck("probe", 1)], "the writer aborted it", True),
        ([Abort("probe", 1, 5, "busy"), "lost"], "busy", False),
        ([Abort("probe", 1, 5, "busy")], "busy", False),
        (["lost"], r"it ended meanwhile \(lost\)", False),
    ],
)
def test_what_else_may_come(run, directory, letters, reason, is_quiet):
    """And without a promise the blocks stay in quarantine."""

    @contextlib.asynccontextmanager
    async def scripted(*_):
        script = iter(letters)

        async def next_letter(_):
            for letter in script:
                return letter
            raise TimeoutError

        yield next_letter

    async def scenario():
        async with attached_pair(directory) as (owner, _, _):
            with pytest.raises(ProbeFailed, match=reason) as excinfo:
                await measuring(owner, owner.peer, "mapped", open_letters=scripted)
            assert (excinfo.value.generation == 0) is is_quiet
            assert (owner.blocks.num_free_blocks == LAYOUT.num_blocks) is is_quiet
            if not is_quiet:
                assert owner.blocks.stats()["quarantined"] == 1
                assert owner.leases.release(excinfo.value.generation)

    run(scenario())


def test_a_lost_connection_leaves_the_lease_for_its_end(run, directory):
    async def scenario():
        async with attached_pair(directory) as (owner, _, _):
            owner.peer.abort("lost by the test")
            with pytest.raises(ProbeFailed, match="lost by the test") as excinfo:
                await measuring(owner, owner.peer, "mapped")
            assert excinfo.value.code == ErrorCode.CONNECTION_LOST
            assert owner.leases.release(excinfo.value.generation) == [0]

    run(scenario())


def test_a_probe_that_is_too_large_is_refused_by_the_writer(run, directory, monkeypatch):
    async def scenario():
        async with attached_pair(directory) as (_, writer, mapped_writer):
            probe = Probe("probe", 1, 1 << 20)
            with pytest.raises(LeaseError, match="a probe of 1048576 tokens has") as excinfo:
                await answer_probe(writer.peer, mapped_writer, LARGE, probe)
            assert excinfo.value.sequence_id == "probe"

    run(scenario())


def test_a_commit_whose_answer_cannot_be_sent_counts(run, directory):
    """The path is proven when the bytes are checked."""

    async def scenario():
        async with probed(directory) as (owner, peer):
            send, acknowledged = peer.send, []

            async def failing(message, *arguments):
                if isinstance(message, CommitAck):
                    acknowledged.append(message)
                    raise ConnectionLost("lost by the test")
                await send(message, *arguments)

            peer.send = failing
            assert (await measuring(owner, peer, "mapped")).nbytes
            assert len(acknowledged) == 3

    run(scenario())


def test_patterns_differ_between_layers_and_probes():
    probes = [Probe("probe", generation, 3) for generation in (1, 2)]
    bodies = [bytes(body) for probe in probes for _, body in probe_module._pattern(LARGE, probe)]
    assert len(set(bodies)) == len(bodies) == 8


class KeyedAttachment:
    """Mapped memory with keys, of which nobody asks but this test; ``num_keys`` can be opened."""

    def __init__(self, num_keys: int = 1000) -> None:
        self.num_keys = num_keys
        self.opened: list[list[int]] = []
        self.closed: list[list[int]] = []
        self.is_cancelled = False

    async def open_keys(self) -> list[int]:
        if self.is_cancelled:
            raise asyncio.CancelledError
        if len(self.opened) >= self.num_keys:
            raise CarrierLost("the device is gone")
        self.opened.append([len(self.opened) + 1, 77])
        return self.opened[-1]

    def close_keys(self, keys: list[int]) -> None:
        self.closed.append(keys)


def noting_keys(owner):
    """The keys of each PROBE that leaves."""
    sent, send = [], owner.peer.send

    async def noting(message, *arguments):
        if isinstance(message, Probe):
            sent.append(message.keys)
        await send(message, *arguments)

    owner.peer.send = noting
    return sent


def test_every_probe_has_keys_of_its_own_and_they_are_closed_behind_it(run, directory):
    async def scenario():
        async with probed(directory) as (owner, peer):
            attachment, sent = KeyedAttachment(), noting_keys(owner)
            await measuring(owner, peer, "mapped", attachment=attachment)
            assert sent == attachment.opened == attachment.closed == [[1, 77], [2, 77], [3, 77]]

    run(scenario())


def test_keys_are_closed_behind_a_probe_that_fails(run, directory):
    async def scenario():
        async with probed(directory, change=lambda _: None) as (owner, peer):
            attachment = KeyedAttachment()
            with pytest.raises(ProbeFailed, match="no COMMIT"):
                await measuring(owner, peer, "mapped", attachment=attachment, timeout_s=0.2)
            assert attachment.opened == attachment.closed == [[1, 77]]

    run(scenario())


def test_keys_that_cannot_be_opened_end_the_probe_and_leave_no_lease(run, directory):
    async def scenario():
        async with probed(directory) as (owner, peer):
            attachment, sent = KeyedAttachment(num_keys=1), noting_keys(owner)
            with pytest.raises(ProbeFailed, match="the device is gone") as excinfo:
                await measuring(owner, peer, "mapped", attachment=attachment)
            assert (excinfo.value.code, excinfo.value.generation) == (ErrorCode.CARRIER_LOST, 0)
            attachment.is_cancelled = True
            with pytest.raises(asyncio.CancelledError):
                await measuring(owner, peer, "mapped", attachment=attachment)
            assert len(sent) == 1
            assert owner.blocks.num_free_blocks == LAYOUT.num_blocks
            assert owner.leases.stats()["num_leases"] == 0

    run(scenario())
