"""Each fault of the proxy does what its name says, and nothing else."""

import asyncio
import random
import time
from itertools import product

import pytest

from tests.kvproto.fault_proxy import FaultProxy, Faults

DATA = random.Random(11).randbytes(200_000)
DIRECTIONS = ["to_target", "to_source"]
WAIT_S = 10.0
# uvloop counts whole milliseconds, so one of its timers may be early by almost two of them.
TIMER_STEP_S = 0.002


class Target:
    """A server that keeps its one connection; both ends are plain streams."""

    def __init__(self) -> None:
        self.connected: asyncio.Queue = asyncio.Queue()

    async def __aenter__(self):
        self.server = await asyncio.start_server(
            lambda reader, writer: self.connected.put_nowait((reader, writer)), "127.0.0.1", 0
        )
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()


class Path:
    """Two ends joined by a proxy; ``source`` sends in the direction that has the faults."""

    def __init__(self, direction: str, faults: Faults) -> None:
        self.direction, self.faults = direction, faults

    async def __aenter__(self):
        self.target = await Target().__aenter__()
        self.proxy = await FaultProxy(
            self.target.port, **{self.direction: self.faults}
        ).__aenter__()
        dialled = await asyncio.open_connection("127.0.0.1", self.proxy.port)
        accepted = await self.target.connected.get()
        self.link = await self.proxy.next_link()
        self.stream = getattr(self.link, self.direction)
        ends = [dialled, accepted]
        (self.source, self.sink) = ends if self.direction == "to_target" else ends[::-1]
        return self

    async def __aexit__(self, *_):
        for _, writer in (self.source, self.sink):
            writer.transport.abort()
        await self.proxy.__aexit__()
        await self.target.__aexit__()

    async def send(self, data: bytes, *, is_end: bool = True) -> None:
        self.source[1].write(data)
        if is_end:
            self.source[1].write_eof()

    async def received(self) -> bytes:
        """Everything until FIN; ConnectionResetError for RST."""
        return await self.sink[0].read(-1)


@pytest.fixture(params=DIRECTIONS)
def over(request, run):
    """Runs a scenario with a path of the given faults, in each direction, on each loop."""

    def run_over(faults, scenario):
        async def bounded():
            async with asyncio.timeout(WAIT_S), Path(request.param, faults) as path:
                await scenario(path)

        run(bounded())

    return run_over


def test_without_faults_everything_passes_and_the_end_too(over):
    async def scenario(path):
        await path.send(DATA)
        assert await path.received() == DATA
        # The other direction is still open.
        path.sink[1].write(b"answer")
        path.sink[1].write_eof()
        assert await path.source[0].read(-1) == b"answer"
        assert path.stream.num_read_nbytes == path.stream.num_passed_nbytes == len(DATA)

    over(Faults(), scenario)


def test_delay(over):
    """The bytes are held back for the time, not lost, and following ones do not add to it."""

    async def scenario(path):
        started_at = time.monotonic()  # uvloop's own clock counts whole milliseconds
        for _ in range(20):
            await path.send(b"x" * 100, is_end=False)
        assert await path.sink[0].readexactly(2000) == b"x" * 2000
        # At least the delay, less what uvloop's timers may be early by; an upper bound would
        # depend on the machine.
        assert time.monotonic() - started_at >= 0.1 - TIMER_STEP_S

    over(Faults(delay_s=0.1), scenario)


def test_throttle(over):
    async def scenario(path):
        started_at = time.monotonic()
        await path.send(DATA)
        assert await path.received() == DATA
        # Each piece of 5000 bytes waits for its own timer, and each may be early.
        num_pieces = -(-len(DATA) // 5000)
        least_s = len(DATA) / 1_000_000 - num_pieces * TIMER_STEP_S
        assert time.monotonic() - started_at >= least_s > 0

    over(Faults(nbytes_per_s=1_000_000, piece_nbytes=lambda: 5000), scenario)


def test_small_pieces(over):
    source = random.Random(1)

    async def scenario(path):
        await path.send(DATA[:3000])
        assert await path.received() == DATA[:3000]

    over(Faults(piece_nbytes=lambda: source.choice([1, 7, 100])), scenario)


@pytest.mark.parametrize("cut_at", [1, 70_000])
def test_cut_with_fin(over, cut_at):
    async def scenario(path):
        await path.send(DATA, is_end=False)
        assert await path.received() == DATA[:cut_at]
        path.sink[1].write(b"answer")
        assert await path.source[0].readexactly(6) == b"answer"

    over(Faults(cut_at=cut_at, is_reset=False), scenario)


def test_cut_with_rst(over):
    async def scenario(path):
        await path.send(DATA, is_end=False)
        with pytest.raises(ConnectionError):
            await path.received()
        with pytest.raises(ConnectionError):
            await path.source[0].read(-1)
        assert path.stream.num_passed_nbytes == 70_000

    over(Faults(cut_at=70_000), scenario)


def test_truncate(over):
    """The tail vanishes; the connection lives on and even its end arrives."""

    async def scenario(path):
        await path.send(DATA, is_end=False)
        assert await path.sink[0].readexactly(70_000) == DATA[:70_000]
        path.sink[1].write(b"answer")
        assert await path.source[0].readexactly(6) == b"answer"
        path.source[1].write_eof()
        assert await path.received() == b""

    over(Faults(truncate_at=70_000), scenario)


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 1), (10, 100), (65_000, 2_000), (0, 150_000), (199_999, 1)]
)
def test_duplicate(over, start, nbytes):
    async def scenario(path):
        await path.send(DATA)
        end = start + nbytes
        assert await path.received() == DATA[:end] + DATA[start:end] + DATA[end:]

    over(Faults(duplicate=(start, nbytes), piece_nbytes=lambda: 9000), scenario)


@pytest.mark.parametrize(("offset", "bit"), [*product([0, 65_536, len(DATA) - 1], [0, 7])])
def test_flip(over, offset, bit):
    async def scenario(path):
        await path.send(DATA)
        damaged = await path.received()
        difference = [index for index in range(len(DATA)) if damaged[index] != DATA[index]]
        assert difference == [offset]
        assert damaged[offset] ^ DATA[offset] == 1 << bit

    over(Faults(flip_at=offset, flip_bit=bit), scenario)


@pytest.mark.parametrize("hold_at", [0, 70_000])
def test_hold_and_resume(over, hold_at):
    async def scenario(path):
        await path.send(DATA)
        await path.stream.held.wait()
        assert path.stream.num_passed_nbytes == hold_at
        assert await path.sink[0].readexactly(hold_at) == DATA[:hold_at]
        path.stream.resume()
        assert await path.received() == DATA[hold_at:]

    over(Faults(hold_at=hold_at), scenario)


def test_pause_and_resume(over):
    async def scenario(path):
        await path.send(b"before", is_end=False)
        assert await path.sink[0].readexactly(6) == b"before"
        path.link.pause()
        assert path.stream.held.is_set()
        await path.send(b"after")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await path.sink[0].read(1)
        path.link.resume()
        assert await path.received() == b"after"

    over(Faults(), scenario)


def test_a_held_stream_slows_its_sender(over):
    async def scenario(path):
        path.link.pause()

        async def send_for_ever():
            while True:
                path.source[1].write(DATA)
                await path.source[1].drain()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send_for_ever(), 0.2)
        assert path.stream.num_passed_nbytes == 0

    over(Faults(), scenario)


def test_faults_can_be_changed_while_the_connection_lives(over):
    async def scenario(path):
        await path.send(b"good", is_end=False)
        assert await path.sink[0].readexactly(4) == b"good"
        path.stream.faults = Faults(flip_at=path.stream.num_read_nbytes + 1)
        await path.send(b"aa")
        assert await path.received() == b"a`"

    over(Faults(), scenario)


def test_rst_passes_through(over):
    async def scenario(path):
        path.link.reset()
        for end in (path.source, path.sink):
            with pytest.raises(ConnectionError):
                await end[0].read(-1)

    over(Faults(), scenario)


def test_a_target_that_does_not_listen(run):
    async def scenario():
        async with Target() as target:
            port = target.port
        async with FaultProxy(port) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            async with asyncio.timeout(WAIT_S):
                assert await reader.read(-1) == b""
            writer.close()

    run(scenario())
