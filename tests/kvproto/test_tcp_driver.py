"""The driver on a transport that only remembers."""

import asyncio
import logging
import socket
import sys

import pytest

from kvproto import tcp_driver
from kvproto.connection import Connection
from kvproto.errors import ConnectionLost, DeadlineExceeded, Overloaded
from kvproto.handshake import Identity
from kvproto.header import Kind
from kvproto.messages import Error, Ping, Started, Write
from kvproto.tcp_driver import (
    MAX_QUEUED_MESSAGES,
    RESUME_QUEUED_MESSAGES,
    WAKE_NBYTES,
    TcpDriver,
)

DECODE = Identity("decode", "d")
PREFILL = Identity("prefill", "p")


class FakeTransport(asyncio.Transport):
    """Counts what the driver does to it."""

    def __init__(self):
        super().__init__({"socket": socket.socket(), "peername": ("127.0.0.1", 1)})
        self.sent: list[bytes] = []
        self.calls: list[str] = []
        self.buffered_nbytes = 0
        self.limits = None

    def set_write_buffer_limits(self, high=None, low=None):
        self.limits = (high, low)

    def get_write_buffer_size(self):
        return self.buffered_nbytes

    def writelines(self, buffers):
        self.sent.append(b"".join(buffers))

    def write_eof(self):
        self.calls.append("write_eof")

    def abort(self):
        self.calls.append("abort")

    def pause_reading(self):
        self.calls.append("pause_reading")

    def resume_reading(self):
        self.calls.append("resume_reading")

    def is_closing(self):
        return False


@pytest.fixture
async def transport():
    transport = FakeTransport()
    yield transport
    transport.get_extra_info("socket").close()


@pytest.fixture
async def driver(transport):
    driver = TcpDriver(DECODE, is_server=False, landing=None, keepalive_s=1000.0)
    driver.connection_made(transport)
    yield driver
    driver.abort(ConnectionLost("the test is over"))
    driver.connection_lost(None)


def receive(driver, data):
    while data:
        buffer = driver.get_buffer(-1)
        nbytes = min(buffer.nbytes, len(data))
        buffer[:nbytes] = data[:nbytes]
        driver.buffer_updated(nbytes)
        data = data[nbytes:]


@pytest.fixture
def ready(driver, transport, wire):
    """A peer that has done its handshake and sends by hand."""
    remote = Connection(PREFILL, nonce=b"p" * 32, is_server=True)
    while driver.remote is None:
        receive(driver, b"".join(remote.data_to_send()))
        for data in transport.sent:
            wire.feed(remote, data)
        transport.sent.clear()
    return remote


@pytest.fixture
async def landing_driver(transport, wire, memory_landing, geometry):
    """A driver that takes WRITEs and has done its handshake."""
    landing = memory_landing(4 * WAKE_NBYTES, pieces=2)
    identity = Identity("decode", "d", geometry.facts())
    driver = TcpDriver(identity, is_server=False, landing=landing, keepalive_s=1000.0)
    driver.connection_made(transport)
    remote = Connection(Identity("prefill", "p", geometry.facts()), nonce=b"p" * 32, is_server=True)
    while driver.remote is None:
        receive(driver, b"".join(remote.data_to_send()))
        for data in transport.sent:
            wire.feed(remote, data)
        transport.sent.clear()
    yield driver
    driver.abort(ConnectionLost("the test is over"))
    driver.connection_lost(None)


def wake_nbytes(transport):
    """What the socket waits for."""
    return transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def write_frame(wire, geometry, body_nbytes):
    message = Write("s", 1, "layers.0", 0, 1)
    return wire.frame(message, [bytes(body_nbytes)], geometry.shape_word(0, 1))


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="SO_RCVLOWAT is for Linux")


@ON_LINUX
async def test_the_socket_waits_for_many_bytes_and_never_for_more_than_must_come(
    landing_driver, transport, wire, geometry
):
    body_nbytes = 2 * WAKE_NBYTES + 100_000
    frame = write_frame(wire, geometry, body_nbytes)
    head_nbytes = len(frame) - body_nbytes
    assert wake_nbytes(transport) == 1
    receive(landing_driver, frame[:head_nbytes])
    assert wake_nbytes(transport) == WAKE_NBYTES
    at = head_nbytes + WAKE_NBYTES
    receive(landing_driver, frame[head_nbytes:at])
    assert wake_nbytes(transport) == WAKE_NBYTES
    receive(landing_driver, frame[at : at + WAKE_NBYTES])
    assert wake_nbytes(transport) == 100_000
    receive(landing_driver, frame[at + WAKE_NBYTES : -1000])
    # So little is not worth a system call.
    assert wake_nbytes(transport) == 1
    receive(landing_driver, frame[-1000:])
    assert wake_nbytes(transport) == 1
    assert isinstance(landing_driver.take(), Write)


@ON_LINUX
async def test_a_small_body_is_not_waited_for(landing_driver, transport, wire, geometry):
    frame = write_frame(wire, geometry, 10_000)
    receive(landing_driver, frame[:-1])
    assert wake_nbytes(transport) == 1


@ON_LINUX
@pytest.mark.parametrize("event", ["keepalive", "close", "fault"])
async def test_the_socket_waits_for_a_byte_again(landing_driver, transport, wire, geometry, event):
    frame = write_frame(wire, geometry, 2 * WAKE_NBYTES)
    receive(landing_driver, frame[:-WAKE_NBYTES])
    assert wake_nbytes(transport) == WAKE_NBYTES
    if event == "keepalive":
        landing_driver._keep_alive(asyncio.get_running_loop().time())
    elif event == "close":
        landing_driver.close()
    else:
        landing_driver.refuse(Overloaded("enough"))
    assert wake_nbytes(transport) == 1


@ON_LINUX
async def test_a_socket_that_closes_is_left_alone(
    landing_driver, transport, wire, geometry, monkeypatch
):
    frame = write_frame(wire, geometry, 2 * WAKE_NBYTES)
    receive(landing_driver, frame[:-WAKE_NBYTES])
    monkeypatch.setattr(transport, "is_closing", lambda: True)
    landing_driver._keep_alive(asyncio.get_running_loop().time())
    assert wake_nbytes(transport) == WAKE_NBYTES


async def test_hello_is_sent_at_once(driver, transport):
    assert transport.sent[0][6] == Kind.HELLO
    nodelay = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert nodelay
    assert transport.limits == (tcp_driver.HIGH_WATER_NBYTES, tcp_driver.LOW_WATER_NBYTES)


async def test_a_long_queue_pauses_reading_and_a_short_one_resumes(driver, transport, ready, wire):
    frame = wire.frame(Started("s", 1, 0.0))
    for _ in range(MAX_QUEUED_MESSAGES - 1):
        receive(driver, frame)
    assert "pause_reading" not in transport.calls
    receive(driver, frame)
    assert transport.calls == ["pause_reading"]
    while len(driver.inbox) > RESUME_QUEUED_MESSAGES:
        assert transport.calls == ["pause_reading"]
        assert driver.take() is not None
    assert transport.calls == ["pause_reading", "resume_reading"]
    while driver.take():
        pass
    assert driver.take() is None


async def test_a_fault_sends_error_then_fin_and_lingers(driver, transport, ready):
    receive(driver, b"\0" * 32)
    assert transport.sent[-1][6] == Kind.ERROR
    assert transport.calls == ["write_eof"]
    # What still comes is dropped; the peer's FIN ends it.
    receive(driver, b"more")
    driver.eof_received()
    driver.connection_lost(None)
    assert driver.lost.is_set()
    with pytest.raises(ConnectionLost) as excinfo:
        driver.check_alive()
    assert not excinfo.value.clean


async def test_a_peer_that_does_not_close_is_cut_after_lingering(
    driver, transport, ready, monkeypatch, until
):
    monkeypatch.setattr(tcp_driver, "FAULT_LINGER_S", 0.01)
    receive(driver, b"\0" * 32)
    await until(lambda: "abort" in transport.calls)


async def test_lingering_resumes_reading(driver, transport, ready, wire):
    for _ in range(MAX_QUEUED_MESSAGES):
        receive(driver, wire.frame(Started("s", 1, 0.0)))
    driver.close()
    assert transport.calls == ["pause_reading", "write_eof", "resume_reading"]
    driver.close()
    driver.refuse(Overloaded("too late"))
    assert transport.calls == ["pause_reading", "write_eof", "resume_reading"]
    assert isinstance(driver.error, ConnectionLost)


async def test_a_peer_that_does_not_read_our_answers_is_aborted(
    driver, transport, ready, wire, monkeypatch
):
    monkeypatch.setattr(tcp_driver, "MAX_UNREAD_REPLIES", 3)
    driver.pause_writing()
    for _ in range(3):
        receive(driver, wire.frame(Ping(1)))
    driver.resume_writing()
    driver.pause_writing()
    for _ in range(3):
        receive(driver, wire.frame(Ping(1)))
    assert transport.calls == []
    receive(driver, wire.frame(Ping(1)))
    assert transport.calls == ["abort"]


async def test_a_bug_in_the_landing_aborts_and_is_logged(driver, transport, ready, caplog):
    def bug(_):
        raise RuntimeError("bug")

    driver.connection.bytes_received = bug
    with caplog.at_level(logging.ERROR):
        receive(driver, b"x")
    assert "receiving failed" in caplog.text
    assert transport.calls == ["abort"]


async def test_silence_aborts_and_pings_are_sent(transport, wire, until):
    driver = TcpDriver(DECODE, is_server=False, landing=None, keepalive_s=0.01)
    driver.connection_made(transport)
    await until(lambda: "abort" in transport.calls)
    assert "silent" in str(driver.error)


async def test_a_stall_of_this_process_is_not_silence(driver, transport, ready):
    now = asyncio.get_running_loop().time()
    # Due long ago: this loop did not run, so nothing could be received.
    driver._keep_alive(now - 10_000)
    assert "abort" not in transport.calls
    assert transport.sent[-1][6] == Kind.PING


async def test_paused_reading_is_not_silence(driver, transport, ready):
    driver._pause_reading()
    driver._received_at -= 1_000_000
    driver._keep_alive(asyncio.get_running_loop().time())
    assert "abort" not in transport.calls


async def test_no_ping_into_a_full_buffer(driver, transport, ready):
    transport.sent.clear()
    driver.pause_writing()
    driver._keep_alive(asyncio.get_running_loop().time())
    assert transport.sent == []


async def test_flushed_waits_for_the_empty_buffer(driver, transport, ready):
    await driver.wait_flushed(1.0)
    transport.buffered_nbytes = 5
    flushed = [asyncio.create_task(driver.wait_flushed(10.0)) for _ in range(2)]
    driver.pause_writing()  # as a transport does once its marks are 0
    await asyncio.sleep(0)
    assert transport.limits == (0, 0)
    assert not any(task.done() for task in flushed)
    transport.buffered_nbytes = 0
    driver.resume_writing()
    await asyncio.gather(*flushed)
    assert transport.limits == (tcp_driver.HIGH_WATER_NBYTES, tcp_driver.LOW_WATER_NBYTES)


async def test_a_buffer_that_never_empties_aborts(driver, transport, ready):
    transport.buffered_nbytes = 5
    driver.pause_writing()
    with pytest.raises(DeadlineExceeded, match="took no bytes"):
        await driver.wait_flushed(0.01)
    assert transport.calls == ["abort"]


async def test_an_error_of_the_peer_is_delivered_and_ends(driver, transport, ready, wire):
    receive(driver, wire.frame(Error(1, "broken")))
    assert driver.take() == Error(1, "broken")
    with pytest.raises(ConnectionLost, match="broken"):
        driver.check_alive()


async def test_stats_before_and_after(transport):
    driver = TcpDriver(DECODE, is_server=False, landing=None, keepalive_s=1000.0)
    assert driver.stats()["write_buffer_nbytes"] == 0
    await driver.wait_flushed(1.0)
    driver.abort(ConnectionLost("never connected"))
    driver.close()
    assert str(driver.error) == "never connected"
