"""What goes wrong on a real wire and with real devices, and what each fault says."""

import asyncio
import contextlib
import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvproto.errors import (
    CarrierLost,
    CarrierUnavailable,
    ConnectionLost,
    KvProtoError,
)
from kvproto.messages import Abort, AbortAck, CommitAck, Offer
from kvproto.rdma.constants import SEND_SIGNALED, Access
from kvproto.rdma.device import open_device as open_by_settings
from kvproto.rdma.memory import RegisteredMemory
from kvproto.rdma.posting import RemoteWrite
from kvproto.rdma.settings import RdmaSettings
from kvproto.rdma.writer import answer_offer
from tests.kvproto.carrier_contract import (
    LARGE,
    ROOT,
    SMALL,
    WAIT_S,
    Kv,
    resources,
    transfer,
    until,
    watched,
    write_all,
)
from tests.kvproto.conftest import run as run
from tests.rdma.locked_memory import with_limit
from tests.rdma.rdma_rig import RdmaRig, RdmaSender, open_device

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(120)]

IS_LONG = os.environ.get("PD_LONG_TESTS") == "1"
NUM_TRANSFERS = 2000 if IS_LONG else 150
STALE = 0xAA


@pytest.fixture
def rig(run):
    """Runs ``scenario(rig)`` with a fresh rig made with the given settings."""
    return lambda scenario, **settings: run(watched(RdmaRig, scenario, **settings))


async def staged_write(sender: RdmaSender, offset: int, key: int, nbytes: int = 4096) -> None:
    """Write STALE at an offset of the pool with any key; CarrierLost if it is refused."""
    writer = sender.placing
    staging = writer._staging
    source = memoryview(bytes([STALE]) * nbytes)
    pieces = [(*piece, staging.memory.lkey) for piece in staging.put(source)]
    staging.release(staging.position)
    pair = writer.queue_pairs[0]
    await pair.wait(await pair.post([RemoteWrite(offset, pieces)], key))


async def write_and_flush(writer, grant, kv) -> None:
    """The second half of the first layer."""
    pieces = kv.pieces(0, 128, 128)
    await writer.write(grant.sequence_id, grant.generation, 0, 128, 128, pieces)
    await writer.flush()


# -- a bad wire ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "impair",
    [lambda network: network.loss(1), lambda network: network.delay(5)],
    ids=["1 % loss", "5 ms delay"],
)
def test_transfers_are_whole_over_a_wire_that_loses_or_delays(rig, network, impair):
    async def attempt(rig, name: str, seed: int) -> bool:
        """One transfer over a connection of its own: whole, or refused by name."""
        sender = await rig.dial(name)
        kv = Kv(LARGE, 120, seed=seed)
        grant = rig.receiver.grant(120, writer=name, expected=kv)
        try:
            assert isinstance(await transfer(rig, sender, grant, kv, chunk_tokens=50), CommitAck)
        except ConnectionLost:
            assert "RDMA over rxe0:1" in str(sender.placing.error)
            await sender.drop()
            await until(grant.released.is_set)
            return False
        assert rig.receiver.holds(grant, kv)
        rig.receiver.blocks.free(grant.block_table, grant.sequence_id)
        await sender.close()
        return True

    async def scenario(rig):
        impair(network)
        # rxe's queue pairs sometimes stall when packets are lost; a worker then asks once more.
        results = [await attempt(rig, f"p{seed}", seed) for seed in range(4)]
        assert sum(results) >= 2
        assert rig.receiver.wrong == []

    rig(scenario, geometry=LARGE)


@pytest.mark.parametrize(
    "sever",
    [lambda network: network.cut(), lambda network: network.loss(100)],
    ids=["cable pulled", "all packets lost"],
)
def test_a_wire_that_is_cut_in_the_middle_fails_by_name_and_another_connection_works(
    rig, network, sever
):
    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        kv = Kv(LARGE, 256, value=STALE)
        grant = receiver.grant(256)
        writer = rig.writer(sender, grant, LARGE)
        await writer.write(grant.sequence_id, grant.generation, 0, 0, 128, kv.pieces(0, 0, 128))
        await writer.flush()
        sever(network)
        async with asyncio.timeout(2 * WAIT_S):
            with pytest.raises(ConnectionLost, match=r"does not answer|nothing has|is down"):
                await write_and_flush(writer, grant, kv)
        # Messages still pass: the writer says so, and its promise is true.
        assert not sender.peer.is_closed
        await sender.peer.send(Abort(grant.sequence_id, grant.generation, 24, "RDMA is lost"))
        await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))
        async with asyncio.timeout(WAIT_S):
            await grant.released.wait()
        await sender.close()
        network.heal()

        again = await rig.dial("again")
        kv = Kv(LARGE, 64, seed=1)
        grant = receiver.grant(64, writer="again", expected=kv)
        assert isinstance(await transfer(rig, again, grant, kv, chunk_tokens=64), CommitAck)
        await again.close()

    rig(scenario, geometry=LARGE)


def test_a_pulled_cable_is_reported_by_the_device(rig, network, caplog):
    async def scenario(rig):
        network.cut()
        await until(lambda: "the link of RDMA port rxe" in caplog.text)

    rig(scenario)


# -- keys ------------------------------------------------------------------------------------------


def other_key(keys: list[int], _pool_nbytes: int) -> tuple[int, int]:
    return 0, keys[0] ^ 0x5500


def behind_the_pool(keys: list[int], pool_nbytes: int) -> tuple[int, int]:
    return pool_nbytes - 100, keys[0]


def before_the_pool(keys: list[int], _pool_nbytes: int) -> tuple[int, int]:
    return (1 << 64) - 4096, keys[0]


@pytest.mark.parametrize("wrong", [other_key, behind_the_pool, before_the_pool])
def test_a_wrong_key_or_address_is_refused_and_writes_nothing(rig, wrong):
    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        grant = receiver.grant(16)
        keys = await receiver.open_keys(grant)
        before = bytes(receiver.pool)
        with pytest.raises(CarrierLost, match=r"REM_ACCESS_ERR \(status 10\).*lease was taken"):
            await staged_write(sender, *wrong(keys, receiver.pool.nbytes))
        assert receiver.pool == before
        # The connection is of no use any more, and says why to everybody.
        with pytest.raises(CarrierLost, match="REM_ACCESS_ERR"):
            await staged_write(sender, 0, keys[0])
        await sender.drop()

    rig(scenario)


def test_a_key_opens_nothing_after_its_lease_has_ended(rig):
    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        kv = Kv(SMALL, 16, seed=1)
        grant = receiver.grant(16, expected=kv)
        [key] = await receiver.open_keys(grant)
        assert isinstance(await transfer(rig, sender, grant, kv), CommitAck)
        await until(lambda: grant.generation not in receiver.keys)
        before = bytes(receiver.pool)
        with pytest.raises(CarrierLost, match="REM_ACCESS_ERR"):
            await staged_write(sender, 0, key)
        assert receiver.pool == before
        await sender.drop()

    rig(scenario)


def test_a_key_of_another_writer_opens_nothing(rig):
    async def scenario(rig):
        receiver = rig.receiver
        thief, owner = await rig.dial("q"), await rig.dial("p")
        grant = receiver.grant(16, writer="p")
        [key] = await receiver.open_keys(grant)
        before = bytes(receiver.pool)
        with pytest.raises(CarrierLost, match=r"REM_ACCESS_ERR|REM_OP_ERR|REM_INV_REQ_ERR"):
            await staged_write(thief, 0, key)
        assert receiver.pool == before
        kv = Kv(SMALL, 16, seed=2)
        grant.expected = kv
        assert isinstance(await transfer(rig, owner, grant, kv), CommitAck)
        await thief.drop()
        await owner.close()

    rig(scenario)


def test_a_writer_that_was_cut_off_can_write_nowhere(rig):
    async def scenario(rig):
        receiver = rig.receiver
        sender = await rig.dial()
        grant = receiver.grant(16)
        [key] = await receiver.open_keys(grant)
        receiver.attachments["p"].cut()
        before = bytes(receiver.pool)
        with pytest.raises(CarrierLost, match=r"does not answer|nothing has completed|REM_"):
            await staged_write(sender, 0, key)
        assert receiver.pool == before
        await sender.drop()

    rig(scenario)


def test_a_message_to_a_receiver_without_receive_requests_harms_its_sender_alone(rig):
    """We never post any; somebody who sends gets "receiver not ready" until he gives up."""

    async def scenario(rig):
        receiver = rig.receiver
        rude, fine = await rig.dial("rude"), await rig.dial("fine")
        pair = rude.placing.queue_pairs[0]
        staging = rude.placing._staging
        verbs = pair._device.verbs
        [(address, nbytes)] = list(staging.put(memoryview(b"hello")))
        piece = verbs.sge(address, nbytes, staging.memory.lkey)
        request = verbs.send_wr(wr_id=1, opcode=2, num_sge=1, sg=[piece], send_flags=SEND_SIGNALED)
        pair._qp.post_send(request)
        pair._num_posted += 1
        request.close()
        piece.close()
        with pytest.raises(CarrierLost, match=r"RNR_RETRY_EXC_ERR|nothing has completed"):
            await pair.wait(1)
        kv = Kv(SMALL, 16, seed=3)
        grant = receiver.grant(16, writer="fine", expected=kv)
        assert isinstance(await transfer(rig, fine, grant, kv), CommitAck)
        await rude.drop()
        await fine.close()

    rig(scenario)


# -- many ------------------------------------------------------------------------------------------


@pytest.mark.timeout(1200 if IS_LONG else 120)
def test_many_transfers_with_random_aborts_touch_no_block_of_others_and_leave_nothing(rig):
    """Blocks go from hand to hand at once; what was committed is compared again later."""

    async def scenario(rig):
        receiver = rig.receiver
        dice = random.Random(4)
        senders = [await rig.dial(f"p{number}") for number in range(3)]
        kept: list = []
        num_aborted = 0
        before = resources()
        for number in range(NUM_TRANSFERS):
            sender = senders[number % 3]
            num_tokens = 1 + dice.randrange(40)
            kv = Kv(SMALL, num_tokens, seed=number)
            grant = receiver.grant(num_tokens, writer=sender.instance_id, expected=kv)
            writer = rig.writer(sender, grant, SMALL)
            if dice.random() < 0.4:
                num_aborted += 1
                writing = asyncio.create_task(write_all(writer, grant, kv, 1 + dice.randrange(8)))
                for _ in range(dice.randrange(12)):
                    await asyncio.sleep(0)
                await receiver.abort(grant)
                assert isinstance(await sender.answer(grant.sequence_id), Abort)
                with contextlib.suppress(KvProtoError):
                    await writing
                with contextlib.suppress(KvProtoError):
                    await writer.flush()
                await sender.peer.send(AbortAck(grant.sequence_id, grant.generation))
                async with asyncio.timeout(WAIT_S):
                    await grant.released.wait()
            else:
                assert isinstance(await transfer(rig, sender, grant, kv, chunk_tokens=7), CommitAck)
                kept.append((grant, kv))
            if len(kept) > 4:
                grant, kv = kept.pop(dice.randrange(len(kept)))
                assert receiver.holds(grant, kv)
                receiver.blocks.free(grant.block_table, grant.sequence_id)
        for grant, kv in kept:
            assert receiver.holds(grant, kv)
            receiver.blocks.free(grant.block_table, grant.sequence_id)
        assert num_aborted > NUM_TRANSFERS // 4
        assert receiver.wrong == []
        assert receiver.keys == {}
        assert receiver.blocks.num_free_blocks == receiver.blocks.num_blocks
        assert resources() == before
        for sender in senders:
            assert sender.placing.stats()["queued_nbytes"] == 0
            await sender.close()

    rig(scenario, num_blocks=64)


def test_registered_memory_goes_down_to_where_it_was(run):
    """What the kernel counts as pinned, before and after a device was used and closed."""

    async def scenario():
        before = pinned_nbytes()
        device = open_device("rxe0")
        pool = memoryview(bytearray(4 << 20))
        memory = RegisteredMemory(device, pool, Access.LOCAL_WRITE, "the pool")
        assert pinned_nbytes() - before >= 4 << 20
        device.close()
        assert pinned_nbytes() == before
        memory.close()  # idempotent, also after its device

    run(scenario())


def pinned_nbytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        [line] = [line for line in status if line.startswith("VmPin:")]
    return int(line.split()[1]) * 1024


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            RdmaSettings(device="mlx5_9"),
            r"no RDMA port mlx5_9; this host has rxe0:1, rxe1:1",
        ),
        (RdmaSettings(device="none"), "rdma_device is none"),
        (
            RdmaSettings(device="rxe0", gid_index=77),
            r"GID index 77 has no address.*leave rdma_gid_index at -1.*pdctl node check",
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_named(run, settings, sentence):
    async def scenario():
        with pytest.raises(CarrierUnavailable, match=sentence):
            open_by_settings(settings).close()

    run(scenario())


PROGRAM = """
import asyncio
from kvproto.errors import KvProtoError
from kvproto.rdma.constants import Access
from kvproto.rdma.memory import RegisteredMemory
from tests.rdma.locked_memory import with_limit
from tests.rdma.rdma_rig import open_device

async def main():
    try:
        device = open_device("rxe0")
        RegisteredMemory(device, memoryview(bytearray(4 << 20)), Access(0), "the pool")
        device.close()
        print("registered")
    except KvProtoError as exc:
        print(exc)

asyncio.run(main())
"""


def said_by(wrap: Callable[[list[str]], list[str]]) -> str:
    """What a process says that opens rxe0 and registers 4 MiB."""
    ended = subprocess.run(
        wrap([sys.executable, "-c", PROGRAM]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    return ended.stdout.strip()


def without_override(command: list[str]) -> list[str]:
    """Root whom permissions stop, like everybody."""
    capabilities = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}", *command]


def test_without_permission_the_sentence_says_what_to_do():
    devices = [f"/dev/infiniband/{name}" for name in os.listdir("/dev/infiniband")]
    for path in devices:
        os.chmod(path, 0)
    try:
        said = said_by(without_override)
    finally:
        for path in devices:
            os.chmod(path, 0o600)
    assert "cannot open the RDMA device rxe0" in said
    assert "pdctl node check" in said


def test_a_small_memlock_limit_is_a_sentence_before_anything_is_pinned():
    said = said_by(lambda command: with_limit(64 * 1024, command))
    assert "memlock limit of this process is 65536" in said
    assert "LimitMEMLOCK=infinity" in said
    assert "pdctl node check" in said


def test_with_a_sufficient_memlock_limit_the_pool_is_registered():
    assert said_by(lambda command: with_limit(16 << 20, command)) == "registered"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"byte_order": 2}, "another byte order"),
        ({"queue_pairs": []}, "names no end of a connection"),
        ({"num_blocks": 0}, "makes no sense"),
        ({"carrier": "smoke"}, "no carrier 'smoke'"),
    ],
)
def test_an_offer_that_cannot_be_taken_is_answered_with_the_reason(rig, change, sentence):
    async def scenario(rig):
        plain = await super(RdmaRig, rig).dial()
        await until(lambda: "p" in rig.receiver.peers)
        attaching = asyncio.create_task(rig._attach("p"))
        offer = await plain.answer("")
        assert isinstance(offer, Offer)
        offer = replace(offer, **change)
        writer = await answer_offer(plain.peer, offer, SMALL, rig._writer_device, ())
        assert writer is None
        with pytest.raises(CarrierUnavailable, match=sentence):
            await attaching
        assert rig.receiver.host.stats()["num_attached"] == 0
        await plain.close()

    rig(scenario)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gid": "no address"}, "is no address"),
        ({"mtu_nbytes": 1000}, "the path MTU is 1000, RDMA knows 256, 512"),
    ],
)
def test_an_end_that_makes_no_sense_is_refused(rig, change, sentence):
    async def scenario(rig):
        plain = await super(RdmaRig, rig).dial()
        await until(lambda: "p" in rig.receiver.peers)
        attaching = asyncio.create_task(rig._attach("p"))
        offer = await plain.answer("")
        ends = [replace(end, **change) for end in offer.queue_pairs]
        writer = await answer_offer(
            plain.peer, replace(offer, queue_pairs=ends), SMALL, rig._writer_device, ()
        )
        assert writer is None
        with pytest.raises(CarrierUnavailable, match=sentence):
            await attaching
        await plain.close()

    rig(scenario)


def test_the_plain_interface_moves_the_same_bytes(rig, monkeypatch: pytest.MonkeyPatch):
    """Devices without the extended interface take chains of work requests."""
    from kvproto.rdma import queue_pair

    made: list[str] = []
    original: Callable = queue_pair.QueuePair._make

    def make_plain(self, *, is_extended: bool) -> None:
        original(self, is_extended=False)
        made.append(type(self._poster).__name__)

    monkeypatch.setattr(queue_pair.QueuePair, "_make", make_plain)

    async def scenario(rig):
        rig.receiver.scatter(seed=5)
        kv = Kv(LARGE, 200, seed=5)
        grant = rig.receiver.grant(200, expected=kv)
        sender = await rig.dial()
        assert isinstance(await transfer(rig, sender, grant, kv, chunk_tokens=70), CommitAck)
        assert set(made) == {"ChainPoster"}
        await sender.close()

    rig(scenario, geometry=LARGE, num_blocks=120)


@pytest.mark.parametrize("num_queue_pairs", [2, 4])
def test_several_connections_carry_one_transfer(run, num_queue_pairs):
    class ManyRig(RdmaRig):
        settings = replace(RdmaRig.settings, num_queue_pairs=num_queue_pairs)

    async def scenario(rig):
        rig.receiver.scatter(seed=6)
        kv = Kv(LARGE, 200, seed=6)
        grant = rig.receiver.grant(200, expected=kv)
        sender = await rig.dial()
        assert len(sender.placing.queue_pairs) == num_queue_pairs
        assert isinstance(await transfer(rig, sender, grant, kv, chunk_tokens=90), CommitAck)
        assert all(pair._num_posted > 0 for pair in sender.placing.queue_pairs)
        await sender.close()

    run(watched(ManyRig, scenario, geometry=LARGE, num_blocks=120))


def test_registered_memory_is_sent_from_where_it_lies(rig):
    async def scenario(rig):
        kv = Kv(LARGE, 128, seed=7)
        memories = [
            RegisteredMemory(rig._writer_device, view, Access(0), "the pool")
            for view in kv.regions.values()
        ]
        sender = await rig.dial()
        sender.placing._memory = tuple(memories)
        grant = rig.receiver.grant(128, expected=kv)
        assert isinstance(await transfer(rig, sender, grant, kv, chunk_tokens=50), CommitAck)
        assert sender.placing._staging.position == 0
        await sender.close()
        for memory in memories:
            memory.close()

    rig(scenario, geometry=LARGE)


def test_staging_memory_smaller_than_a_write_is_used_again(rig, monkeypatch):
    from kvproto.rdma import writer as writer_module

    monkeypatch.setattr(
        writer_module.RdmaWriter.__init__,
        "__kwdefaults__",
        {"base": 0, "key": 0, "staging_nbytes": 64 * 1024},
    )

    async def scenario(rig):
        kv = Kv(LARGE, 256, seed=8)
        grant = rig.receiver.grant(256, expected=kv)
        sender = await rig.dial()
        assert sender.placing._staging.nbytes == 64 * 1024
        assert isinstance(await transfer(rig, sender, grant, kv, chunk_tokens=100), CommitAck)
        await sender.close()

    rig(scenario, geometry=LARGE)


def test_address_of_names_the_memory_itself():
    from kvproto.rdma.memory import address_of

    memory = bytearray(b"abcdef")
    assert ctypes.string_at(address_of(memoryview(memory)[2:]), 2) == b"cd"
    assert address_of(memoryview(b"read only")) == 0
    assert address_of(memoryview(memory)[::2]) == 0
