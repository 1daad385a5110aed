"""The region: sealed, whole, described by its first bytes; and how a writer maps it."""

import array
import fcntl
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvproto import region as region_module
from kvproto.errors import CarrierUnavailable, LocalProtocolError
from kvproto.frame import encode_frame
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.handshake import canary_bytes
from kvproto.header import HOST_ORDER, ByteOrder, Kind
from kvproto.record import encode_record, field_infos
from kvproto.region import (
    NUM_SLOTS,
    POOL_OFFSET,
    SLOT_NBYTES,
    SLOTS_OFFSET,
    ForeignRegion,
    Region,
    RegionHeader,
)
from tests.kvproto.mapped_pair import GEOMETRY, LAYOUT

ROOT = Path(__file__).parents[2]


@pytest.fixture
def region():
    region = Region.create(LAYOUT, "d")
    yield region
    region.close()


@pytest.fixture
def forged():
    """Makes an anonymous file with any header and seals."""
    descriptors = []

    def forge(raw: bytes, nbytes: int = POOL_OFFSET + 65536, seals: int = fcntl.F_SEAL_SHRINK):
        descriptor = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        descriptors.append(descriptor)
        os.ftruncate(descriptor, nbytes)
        os.pwrite(descriptor, raw, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor

    yield forge
    for descriptor in descriptors:
        os.close(descriptor)


def header(**changes) -> RegionHeader:
    return replace(
        RegionHeader(
            instance_id="d",
            dtype=GEOMETRY.dtype,
            regions_digest=GEOMETRY.regions_digest(),
            num_blocks=LAYOUT.num_blocks,
            block_size=LAYOUT.block_size,
            slots_offset=SLOTS_OFFSET,
            num_slots=NUM_SLOTS,
            pool_offset=POOL_OFFSET,
            pool_nbytes=LAYOUT.nbytes,
        ),
        **changes,
    )


def frame(
    described: RegionHeader, order: ByteOrder = HOST_ORDER, kind: Kind = Kind.REGION
) -> bytes:
    fields = encode_record(described, field_infos(RegionHeader), order)
    return b"".join(encode_frame(kind, fields, order=order))


# -- the owner's side ------------------------------------------------------------------------------


def test_both_sides_see_the_same_bytes(region):
    foreign = ForeignRegion.map(region.fd, GEOMETRY, "d")
    assert foreign.layout == LAYOUT
    foreign.put(8, memoryview(bytearray(b"writable")))
    foreign.put(16, memoryview(b"constant"))
    assert region.pool[:32] == bytes(8) + b"writableconstant" + bytes(8)
    region.pool[LAYOUT.nbytes - 1] = 7
    foreign.put(0, memoryview(b""))
    foreign.close()
    foreign.close()
    assert region.pool[LAYOUT.nbytes - 1] == 7


def test_the_pool_is_an_ordinary_buffer_of_the_layouts_size(region):
    assert (region.pool.nbytes, region.pool.readonly, region.pool.format) == (
        LAYOUT.nbytes,
        False,
        "B",
    )
    numbers = region.pool[:16].cast("I")
    numbers[0] = 5
    assert region.pool[:4] == array.array("I", [5]).tobytes()
    numbers.release()


def test_nobody_can_change_the_size(region):
    for nbytes in (0, os.fstat(region.fd).st_size + mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_every_page_is_taken_at_once(region):
    status = os.fstat(region.fd)
    assert status.st_blocks * 512 >= status.st_size >= POOL_OFFSET + LAYOUT.nbytes


def test_the_descriptor_is_not_inherited(region):
    assert not os.get_inheritable(region.fd)


def test_close_waits_for_the_last_view_of_the_pool(region):
    kept = region.pool[:1]
    assert not region.close()
    assert region.fd == -1
    kept[0] = 1  # still there
    kept.release()
    assert region.close()
    assert region.close()


def test_a_tensor_like_export_keeps_the_mapping(region):
    kept = memoryview(array.array("B")).toreadonly()  # nothing of ours
    exported = memoryview(region.pool)
    assert not region.close()
    exported.release()
    assert region.close()
    kept.release()


def test_more_than_is_available_is_refused_before_anything_is_taken():
    with pytest.raises(LocalProtocolError, match=r"there are 1000 available.*smaller pool size"):
        Region.create(LAYOUT, "d", available_nbytes=1000)
    Region.create(LAYOUT, "d", available_nbytes=1 << 30).close()


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_too_little_memory_is_an_error_and_no_signal(limit):
    """In a process of its own: the limits hold for a whole process."""
    program = f"""
import os, resource
from kvproto.errors import LocalProtocolError
from kvproto.geometry import KvGeometry, PoolLayout
from kvproto.region import Region
layout = PoolLayout(KvGeometry.uniform(2, 8, 128, "float32", ("a", "b")), 4096, 16)
resource.setrlimit(resource.{limit}, (1 << 29, 1 << 29))
before = len(os.listdir("/proc/self/fd"))
try:
    Region.create(layout, "d")
except LocalProtocolError as exc:
    assert "give a smaller pool size" in str(exc), exc
else:
    raise AssertionError(layout.nbytes)
assert len(os.listdir("/proc/self/fd")) == before
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert finished.returncode == 0, finished.stderr


def test_an_older_kernel_gets_its_pages_by_fallocate(monkeypatch):
    monkeypatch.setattr(region_module, "_MADV_POPULATE_WRITE", 9999)  # EINVAL
    monkeypatch.setattr(region_module, "_MFD_NOEXEC_SEAL", 1 << 20)  # EINVAL
    region = Region.create(LAYOUT, "d")
    status = os.fstat(region.fd)
    assert status.st_blocks * 512 >= status.st_size
    ForeignRegion.map(region.fd, GEOMETRY, "d").close()
    region.close()


def test_a_refusal_of_the_system_is_an_error(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(region_module, "_take_pages", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LocalProtocolError, match="Cannot allocate memory"):
        Region.create(LAYOUT, "d")
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(LocalProtocolError, match="Cannot allocate memory"):
        Region.create(LAYOUT, "d")


def test_other_systems_say_that_they_cannot():
    """Everything imports, and the carrier says so in one sentence."""
    program = """
import asyncio, os, sys
del os.memfd_create
sys.platform = "darwin"
import kvproto.mapped, kvproto.mapped_host, kvproto.region
from kvproto.errors import CarrierUnavailable
from kvproto.geometry import KvGeometry, PoolLayout
geometry = KvGeometry.uniform(1, 1, 1, "float32", ("a",))
async def attach():
    await kvproto.mapped.attach("d", bytes(32), geometry)
for call in (
    lambda: kvproto.region.Region.create(PoolLayout(geometry, 1, 1), "d"),
    lambda: asyncio.run(attach()),
):
    try:
        call()
    except CarrierUnavailable as exc:
        assert "needs Linux" in str(exc) and "darwin" in str(exc)
    else:
        raise AssertionError
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert finished.returncode == 0, finished.stderr


# -- the writer's side -----------------------------------------------------------------------------

WRONG = {
    "another owner": (frame(header(instance_id="e")), "instance_id 'e', this side needs 'd'"),
    "another dtype": (frame(header(dtype="float16")), "dtype 'float16'"),
    "another model": (frame(header(regions_digest="0" * 16)), "regions_digest"),
    "a pool of another size": (frame(header(num_blocks=15)), "does not fit"),
    "slots in the header": (frame(header(slots_offset=16)), "does not fit"),
    "slots in the pool": (frame(header(num_slots=1000)), "does not fit"),
    "a pool on no page": (frame(header(pool_offset=POOL_OFFSET + 64)), "does not fit"),
    "a pool behind the end": (frame(header(pool_offset=2 * POOL_OFFSET)), "does not fit"),
    "no header": (bytes(100), "not written yet"),
    "no frame": (b"something else" * 10, "frame starts with"),
    "another frame": (frame(header(), kind=Kind.KV_FILE), "is KV_FILE"),
    "another byte order": (
        frame(header(), ByteOrder.BIG if HOST_ORDER is ByteOrder.LITTLE else ByteOrder.LITTLE),
        "not this host's",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_region_that_does_not_fit_is_refused(forged, fault):
    raw, reason = WRONG[fault]
    with pytest.raises(CarrierUnavailable, match=reason):
        ForeignRegion.map(forged(raw), GEOMETRY, "d")


def test_the_right_header_is_accepted_by_the_same_means(forged):
    ForeignRegion.map(forged(frame(header())), GEOMETRY, "d").close()


def test_each_damaged_byte_of_the_header_is_found(forged):
    raw = frame(header())
    for index in range(len(raw)):
        damaged = bytearray(raw)
        damaged[index] ^= 0x10
        with pytest.raises(CarrierUnavailable):
            ForeignRegion.map(forged(bytes(damaged)), GEOMETRY, "d")


def test_a_file_that_could_shrink_is_refused(forged):
    with pytest.raises(CarrierUnavailable, match="could shrink under us"):
        ForeignRegion.map(forged(frame(header()), seals=0), GEOMETRY, "d")


def test_what_is_no_memory_is_refused(tmp_path):
    with (
        open(tmp_path / "file", "wb") as file,
        pytest.raises(CarrierUnavailable, match="no sealed memory"),
    ):
        ForeignRegion.map(file.fileno(), GEOMETRY, "d")


def test_a_region_that_cannot_be_mapped_is_refused(region, monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CarrierUnavailable, match="cannot map a region of"):
        ForeignRegion.map(region.fd, GEOMETRY, "d")


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (LAYOUT.nbytes, 1), (LAYOUT.nbytes - 3, 4), (1 << 70, 1)]
)
def test_nothing_is_written_outside_the_pool(region, offset, nbytes):
    foreign = ForeignRegion.map(region.fd, GEOMETRY, "d")
    before = bytes(region.pool)
    with pytest.raises(LocalProtocolError, match="outside the pool"):
        foreign.put(offset, memoryview(bytearray(b"x" * nbytes)))
    assert region.pool == before
    foreign.close()
    with pytest.raises(LocalProtocolError, match="was closed"):
        foreign.put(0, memoryview(b"x"))


def test_probe_slots_are_apart_and_in_front_of_the_pool(region):
    foreign = ForeignRegion.map(region.fd, GEOMETRY, "d")
    nonces = [bytes([index % 256]) * 32 for index in range(NUM_SLOTS)]
    for index, nonce in enumerate(nonces):
        foreign.write_slot(index, nonce)
    for index, nonce in enumerate(nonces):
        proof = canary_bytes() + nonce
        assert region.slot(index) == proof + bytes(SLOT_NBYTES - len(proof))
    assert not any(region.pool)
    with pytest.raises(CarrierUnavailable, match=f"probe slot {NUM_SLOTS}"):
        foreign.write_slot(NUM_SLOTS, bytes(32))
    foreign.close()


def test_a_large_pool_needs_no_more_than_arithmetic_to_be_refused(forged):
    """Numbers of a peer: nothing is allocated for them."""
    raw = frame(header(num_blocks=1 << 20, block_size=(1 << 32) - 1))
    with pytest.raises(CarrierUnavailable, match="does not fit"):
        ForeignRegion.map(forged(raw), GEOMETRY, "d")


def test_another_geometry_is_refused(region):
    other = KvGeometry.uniform(1, 1, 4, "float32", ("a",))
    assert PoolLayout(other, 1, 1).nbytes
    with pytest.raises(CarrierUnavailable, match="regions_digest"):
        ForeignRegion.map(region.fd, other, "d")
