"""A private directory, and sockets in it: nothing of another user, nothing of the dead."""

import os
import socket
import time
from pathlib import Path

import pytest

from kvproto.errors import CarrierUnavailable
from kvproto.socket_directory import SocketDirectory, default_path, peer_uid, socket_name


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sockets"


@pytest.fixture
def directory(path):
    opened = SocketDirectory.open(path, is_owner=True)
    yield opened
    opened.close()


def test_an_owner_makes_it_and_makes_it_private(directory, path):
    assert path.stat().st_mode & 0o777 == 0o700
    again = SocketDirectory.open(path, is_owner=True)
    again.close()
    again.close()


def test_a_writer_makes_nothing(path):
    with pytest.raises(CarrierUnavailable, match="No such file"):
        SocketDirectory.open(path, is_owner=False)
    assert not path.exists()


def test_a_parent_that_is_missing_is_named(path):
    with pytest.raises(CarrierUnavailable, match=r"cannot create the directory .*sockets/deeper"):
        SocketDirectory.open(path / "deeper", is_owner=True)


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o720, 0o777, 0o750])
def test_a_directory_that_others_may_enter_is_refused(path, mode):
    path.mkdir()
    path.chmod(mode)
    for is_owner in (True, False):
        with pytest.raises(CarrierUnavailable, match="others may enter it"):
            SocketDirectory.open(path, is_owner=is_owner)


def test_a_directory_of_another_user_is_refused(path, monkeypatch):
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CarrierUnavailable, match="belongs to uid"):
        SocketDirectory.open(path, is_owner=False)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_a_symbolic_link_and_a_file_are_refused(path, tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    path.symlink_to(real)
    for is_owner in (True, False):
        with pytest.raises(CarrierUnavailable, match="not a link"):
            SocketDirectory.open(path, is_owner=is_owner)
    path.unlink()
    path.write_bytes(b"")
    with pytest.raises(CarrierUnavailable, match="must be a directory"):
        SocketDirectory.open(path, is_owner=True)


def test_a_directory_put_in_its_place_later_is_not_used(directory, path, tmp_path):
    """What was checked is what is used."""
    path.rename(tmp_path / "moved")
    path.mkdir(mode=0o777)
    with directory.listen("d"):
        assert list(path.iterdir()) == []
        assert [entry.name for entry in (tmp_path / "moved").iterdir()] == ["d.sock"]


@pytest.mark.parametrize("name", ["", "a/b", "../d", "a b", "é", "x" * 65, "a\0", "a\n"])
def test_instance_ids_that_are_no_file_names_are_refused(directory, name):
    with pytest.raises(CarrierUnavailable, match="letters, digits"):
        socket_name(name)
    with pytest.raises(CarrierUnavailable, match="letters, digits"):
        directory.listen(name)


@pytest.mark.parametrize("name", ["d", "decode-1.example_2", "x" * 64, ".", ".."])
def test_the_others_work_however_deep_the_directory_lies(tmp_path, name):
    deep = tmp_path
    for _ in range(8):
        deep = deep / ("d" * 40)
        deep.mkdir()
    opened = SocketDirectory.open(deep / "sockets", is_owner=True)
    with opened.listen(name), socket.socket(socket.AF_UNIX) as dialled:
        dialled.connect(opened.address(socket_name(name)))
        assert peer_uid(dialled) == os.geteuid()
    opened.unlink(name)
    opened.unlink(name)
    assert os.listdir(deep / "sockets") == []
    opened.close()


def test_sockets_of_the_dead_are_removed_and_others_are_not(directory, path):
    directory.listen("dead").close()
    dead_start = path / "dead.17.new"
    directory.listen("x").close()
    os.rename(path / "x.sock", dead_start)
    os.utime(dead_start, (time.time() - 1000,) * 2)
    with directory.listen("living"):
        starting = socket.socket(socket.AF_UNIX)
        starting.bind(directory.address("starting.18.new"))
        (path / "notes.sock").write_bytes(b"no socket")
        (path / "other").write_bytes(b"")
        with directory.listen("new"):
            assert sorted(os.listdir(path)) == [
                "living.sock",
                "new.sock",
                "notes.sock",
                "other",
                "starting.18.new",
            ]
        starting.close()


def test_a_living_owner_is_not_replaced(directory, path):
    with directory.listen("d") as first:
        with pytest.raises(CarrierUnavailable, match="another process serves under this"):
            directory.listen("d")
        with socket.socket(socket.AF_UNIX) as dialled:
            dialled.connect(directory.address("d.sock"))
            first.accept()[0].close()
    # The next one may have the name: nobody listens any more.
    directory.listen("d").close()
    assert os.listdir(path) == ["d.sock"]


def test_an_owner_whose_backlog_is_full_lives(directory, path):
    with directory.listen("busy"):
        dialled = []
        is_full = False
        while not is_full:
            dialled.append(socket.socket(socket.AF_UNIX))
            dialled[-1].setblocking(False)
            is_full = dialled[-1].connect_ex(directory.address("busy.sock")) != 0
        directory.listen("d").close()
        assert (path / "busy.sock").exists()
        for connection in dialled:
            connection.close()


def test_a_directory_that_cannot_be_written_is_an_error(directory, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CarrierUnavailable, match=r"cannot listen as d\.sock.*No space left"):
        directory.listen("d")
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_the_default_directory(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_path() == Path("/run/user/7/pdserve")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert default_path() == Path(f"/tmp/pdserve-{os.geteuid()}")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_path() == Path(f"/tmp/pdserve-{os.geteuid()}")
