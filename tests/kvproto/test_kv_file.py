"""KV files on a real file system: whole, unfinished, hostile."""

import errno
import os
import resource
import stat
from pathlib import Path

import numpy as np
import pytest

from kvproto.description import layer_records
from kvproto.errors import KvFileError
from kvproto.geometry import KvGeometry
from kvproto.header import HOST_ORDER, ByteOrder
from kvproto.kv_cache import KvCache
from kvproto.kv_file import KvFile, KvFileWriter, save_kv
from kvproto.kv_file_head import KvFileHead, encode_head

GEOMETRY = KvGeometry.uniform(2, 2, 8, "float32", ["a", "b"], windows_tokens=[0, 3])
TOKENS = [9, 8, 7, 6, 5]
OTHER_ORDER = ByteOrder.BIG if HOST_ORDER is ByteOrder.LITTLE else ByteOrder.LITTLE


def filled(geometry=GEOMETRY):
    cache = KvCache(
        geometry,
        TOKENS,
        model="tiny",
        facts={"weights_digest": "w"},
        wire_error=0.125,
        next_tokens=[4],
    )
    for start, nbytes in cache.layout.spans():
        cache.memory[start : start + nbytes] = np.random.default_rng(start).bytes(nbytes)
    return cache


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "prompt.kv"
    save_kv(path, filled())
    return path


def refusal(path, **options):
    """The one sentence with which a file is refused."""
    with pytest.raises(KvFileError) as caught:
        KvFile.open(path, **options)
    assert caught.value.path == str(path)
    assert "\n" not in str(caught.value)
    return caught.value.reason


# -- whole files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_what_was_saved_is_what_is_opened(tmp_path, dtype):
    path = tmp_path / "prompt.kv"
    cache = filled(GEOMETRY.as_wire(dtype))
    save_kv(path, cache)
    with KvFile.open(path) as file:
        file.verify()
        found = file.cache
        assert found.memory == cache.memory
        assert found.memory.readonly
        assert (found.geometry, found.tokens) == (cache.geometry, cache.tokens)
        assert found.next_tokens == (4,)
        assert (found.model, found.facts, found.wire_error) == ("tiny", cache.facts, 0.125)
        assert file.head.digests == cache.digests()
        assert (file.order, file.nbytes) == (HOST_ORDER, path.stat().st_size)
    assert np.array_equal(found.region("a", "k"), cache.region("a", "k")), "views outlive close"


def test_the_file_is_private_and_nothing_is_left_beside_it(saved):
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert os.listdir(saved.parent) == [saved.name]


def test_a_file_appears_with_commit_and_not_before(tmp_path):
    path = tmp_path / "prompt.kv"
    path.write_bytes(b"the one before")
    writer = KvFileWriter(path, GEOMETRY, TOKENS)
    [scratch] = [entry for entry in tmp_path.iterdir() if entry != path]
    assert path.read_bytes() == b"the one before"
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o600
    assert scratch.stat().st_blocks * 512 >= scratch.stat().st_size, "the room is reserved"
    assert "is not committed" in refusal(scratch)
    writer.cache.memory[:] = filled().memory
    assert "is not committed" in refusal(scratch), "the header comes last"
    writer.commit()
    writer.discard()
    with KvFile.open(path) as file:
        file.verify()
    assert os.listdir(tmp_path) == [path.name]


def test_what_is_not_committed_is_removed(tmp_path):
    with KvFileWriter(tmp_path / "prompt.kv", GEOMETRY, TOKENS) as writer:
        memory = writer.cache.memory
    assert os.listdir(tmp_path) == []
    memory[:3] = b"abc"
    assert memory[:3] == b"abc", "views outlive the writer"


def test_a_file_of_the_other_byte_order_is_converted_while_it_is_read(tmp_path):
    cache = filled(GEOMETRY.as_wire("int8"))
    theirs = KvCache(cache.geometry, TOKENS, memory=bytearray(cache.memory))
    theirs.swap_bytes()
    head = KvFileHead(
        1, "tiny", {}, "int8", layer_records(theirs.geometry), TOKENS, theirs.digests()
    )
    path = tmp_path / "theirs.kv"
    path.write_bytes(bytes(encode_head(head, theirs.memory, OTHER_ORDER)) + bytes(theirs.memory))
    with KvFile.open(path) as file:
        assert file.order is OTHER_ORDER
        assert file.cache.memory == cache.memory
        assert not file.cache.memory.readonly
        file.verify()


@pytest.mark.parametrize("mode", [0o660, 0o602])
def test_a_file_that_others_may_shorten_is_copied(saved, mode):
    saved.chmod(mode)
    with KvFile.open(saved) as file:
        os.truncate(saved, 64)
        assert file.cache.memory == filled().memory
        with pytest.raises(KvFileError, match="somebody shortened it while it was read"):
            file.verify()


def test_a_file_is_copied_on_demand(saved):
    with KvFile.open(saved, is_copied=True) as file:
        assert file.cache.memory == filled().memory
        assert not file.cache.memory.readonly


def test_closing_twice_is_once(saved):
    file = KvFile.open(saved)
    file.close()
    file.close()


def test_opening_reads_the_head_alone(tmp_path, monkeypatch):
    geometry = KvGeometry.uniform(4, 8, 64, "float32", list("abcd"))
    path = tmp_path / "prompt.kv"
    with KvFileWriter(path, geometry, range(4096)) as writer:
        writer.commit()
    read = []
    genuine = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda *arguments: read.append(genuine(*arguments)) or read[-1]
    )
    with KvFile.open(path) as file:
        assert file.nbytes > 64 << 20
    assert sum(read) < 64 << 10


# -- hostile files ---------------------------------------------------------------------------------


def test_every_cut_is_one_sentence(saved):
    raw = saved.read_bytes()
    for size in (*range(0, 70), 500, len(raw) - 1):
        saved.write_bytes(raw[:size])
        assert "not a KV file" in refusal(saved) or "was cut" in refusal(saved)
    saved.write_bytes(raw + b"x")
    assert "payload: has" in refusal(saved)


def test_every_flipped_byte_is_found(saved):
    raw = saved.read_bytes()
    head_nbytes = len(raw) - filled().nbytes
    with saved.open("r+b", buffering=0) as damaged:
        for index in (*range(head_nbytes), *range(head_nbytes, len(raw), 13)):
            os.pwrite(damaged.fileno(), bytes([raw[index] ^ 0x40]), index)
            with pytest.raises(KvFileError), KvFile.open(saved) as file:
                file.verify()
            os.pwrite(damaged.fileno(), raw[index : index + 1], index)
    with KvFile.open(saved) as file:
        file.verify()


def test_a_damaged_region_is_named(saved):
    raw = bytearray(saved.read_bytes())
    raw[-1] ^= 1
    saved.write_bytes(raw)
    with KvFile.open(saved) as file, pytest.raises(KvFileError, match="region v of layer b has"):
        file.verify()


def test_a_gap_that_is_not_zero_is_found(tmp_path):
    path = tmp_path / "prompt.kv"
    save_kv(path, filled(GEOMETRY.as_wire("float8_e5m2")))
    with KvFile.open(path) as file:
        offset, _ = file.cache.layout.gaps()[0]
        at = file.nbytes - file.cache.nbytes + offset
    raw = bytearray(path.read_bytes())
    raw[at] = 1
    path.write_bytes(raw)
    with KvFile.open(path) as file, pytest.raises(KvFileError, match=f"byte {at} and following"):
        file.verify()


def test_a_body_that_does_not_fit_is_refused(tmp_path):
    cache = filled()
    head = KvFileHead(1, "", {}, "float32", layer_records(GEOMETRY), [1] * 1000, cache.digests())
    path = tmp_path / "prompt.kv"
    path.write_bytes(bytes(encode_head(head, cache.memory)) + bytes(cache.memory))
    assert "its body does not fit its head" in refusal(path)


def test_things_that_are_no_files(tmp_path, saved):
    assert refusal(tmp_path) == "is not a plain file"
    os.mkfifo(tmp_path / "fifo")
    assert refusal(tmp_path / "fifo") == "is not a plain file"
    (tmp_path / "link").symlink_to(saved)
    assert refusal(tmp_path / "link") == "is a symbolic link; name the file itself"
    assert refusal(tmp_path / "nothing") == "No such file or directory"
    assert refusal(Path("\0")) == "embedded null byte"
    (tmp_path / "text").write_text("hello, this is a text that is longer than a head\n")
    assert refusal(tmp_path / "text").startswith("is not a KV file")
    (tmp_path / "zeros").write_bytes(bytes(100))
    assert "is not committed" in refusal(tmp_path / "zeros")
    (tmp_path / "empty").write_bytes(b"")
    assert "of 0 bytes ends inside its head" in refusal(tmp_path / "empty")


def test_a_file_that_shrinks_while_it_is_read(saved, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert refusal(saved) == "ends at byte 0; somebody shortened it while it was read"


def test_a_file_that_cannot_be_mapped(saved, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr("kvproto.kv_file.mmap.mmap", fail)
    assert refusal(saved) == "cannot be mapped: No such device"


def test_a_disk_that_cannot_be_read(saved, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    assert refusal(saved) == "cannot be read: Input/output error"


# -- writing that fails ----------------------------------------------------------------------------


def unwritable(path):
    with pytest.raises(KvFileError) as caught:
        KvFileWriter(path, GEOMETRY, TOKENS)
    return caught.value.reason


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    assert unwritable(tmp_path / "a.kv") == "cannot be written: No space left on device"
    assert os.listdir(tmp_path) == []


def test_the_kernel_says_itself_that_a_file_may_not_grow(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        assert unwritable(tmp_path / "a.kv") == "cannot be written: File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_names_that_cannot_be_written(tmp_path):
    assert unwritable(tmp_path) == "is a folder; name a file in it"
    assert unwritable(tmp_path / "no" / "a.kv") == "cannot be written: No such file or directory"


def test_a_failed_commit_leaves_nothing(tmp_path, monkeypatch):
    writer = KvFileWriter(tmp_path / "a.kv", GEOMETRY, TOKENS)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KvFileError, match="cannot be written: Input/output error"):
        writer.commit()
    assert os.listdir(tmp_path) == []
