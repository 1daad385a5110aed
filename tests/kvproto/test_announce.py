"""A worker at the router: registration, renewal, and coming back."""

import asyncio
import contextlib

import pytest

from kvproto import announce as announce_module
from kvproto.announce import announce
from kvproto.errors import ConnectionLost
from kvproto.handshake import Identity
from kvproto.messages import Abort, Error, Register, Registered, Renew
from kvproto.tcp import serve

ROUTER = Identity("router", "r")
WORKER = Identity("decode", "d-1")
REGISTER = Register("decode", "d-1", "127.0.0.1", 7402, "tiny", {"dtype": "float32"}, 512, 64, 16)


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr(announce_module, "MIN_BACKOFF_S", 0.005)
    monkeypatch.setattr(announce_module, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(announce_module, "CONNECT_TIMEOUT_S", 1.0)


class Router:
    """Remembers what workers say; ``script`` says what happens at each connection."""

    def __init__(self, lease_s=0.03):
        self.lease_s = lease_s
        self.received: asyncio.Queue = asyncio.Queue()
        self.ended: asyncio.Queue = asyncio.Queue()
        self.script: list[str] = []

    async def handle(self, peer):
        action = self.script.pop(0) if self.script else "accept"
        self.received.put_nowait(await peer.receive())
        if action == "refuse":
            await peer.send(Error(3, "another model", "dtype"))
        elif action == "nonsense":
            await peer.send(Abort("s", 1, 9, ""))
        elif action == "silence":
            with contextlib.suppress(ConnectionLost):
                await peer.receive()
        elif action == "drop":
            await peer.send(Registered(self.lease_s))
            peer.abort("a test")
        elif action == "expel":
            await peer.send(Registered(self.lease_s))
            await peer.send(Error(11, "your lease ran out"))
        else:
            await peer.send(Registered(self.lease_s))
            try:
                async for message in peer:
                    self.received.put_nowait(message)
                self.ended.put_nowait("clean")
            except ConnectionLost as exc:
                self.ended.put_nowait(exc.reason)

    async def serve(self, port=0, tls=None):
        return await serve("127.0.0.1", port, identity=ROUTER, handler=self.handle, tls=tls)


class Worker:
    """A worker that announces itself in the background."""

    def __init__(self, port, tls=None):
        self.port = port
        self.tls = tls
        self.stop = asyncio.Event()
        self.states: list[tuple[bool, str]] = []
        self.changed = asyncio.Event()
        self.num_renewals = 0

    def load(self):
        self.num_renewals += 1
        return Renew("d-1", self.num_renewals, 0, 0, 64, False)

    def on_state(self, is_registered, reason):
        self.states.append((is_registered, reason))
        self.changed.set()

    async def until_state(self, is_registered, text):
        async with asyncio.timeout(10):
            while not any(
                state == is_registered and text in reason for state, reason in self.states
            ):
                self.changed.clear()
                await self.changed.wait()

    async def __aenter__(self):
        self.task = asyncio.create_task(
            announce(
                "127.0.0.1",
                self.port,
                identity=WORKER,
                registration=REGISTER,
                load=self.load,
                stop=self.stop,
                on_state=self.on_state,
                tls=self.tls,
            )
        )
        return self

    async def __aexit__(self, *_):
        self.stop.set()
        await self.task


def test_registers_then_renews_with_the_present_load(run):
    async def scenario():
        router = Router()
        server = await router.serve()
        async with Worker(server.port) as worker:
            assert await router.received.get() == REGISTER
            for number in range(1, 6):
                assert await router.received.get() == Renew("d-1", number, 0, 0, 64, False)
            assert worker.states == [(True, f"registered at the router 127.0.0.1:{server.port}")]
        assert await router.ended.get() == "clean"
        assert worker.states[-1][0] is False
        assert "this worker stops" in worker.states[-1][1]
        await server.close()

    run(scenario())


def test_a_router_that_is_not_there_yet(run):
    async def scenario():
        router = Router()
        server = await router.serve()
        port = server.port
        await server.close()
        async with Worker(port) as worker:
            await worker.until_state(False, "cannot connect")
            server = await router.serve(port)
            await worker.until_state(True, "registered")
        await server.close()

    run(scenario())


def test_a_router_that_restarts_learns_of_the_worker_again(run):
    async def scenario():
        router = Router()
        server = await router.serve()
        port = server.port
        async with Worker(port) as worker:
            assert await router.received.get() == REGISTER
            await worker.until_state(True, "registered")
            await server.close()
            await worker.until_state(False, "closed the connection")
            worker.states.clear()
            again = Router()
            server = await again.serve(port)
            assert await again.received.get() == REGISTER
            await worker.until_state(True, "registered")
        await server.close()

    run(scenario())


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("refuse", "another model"),
        ("nonsense", "ABORT in answer to REGISTER"),
        ("drop", "connection lost"),
        ("expel", "your lease ran out"),
    ],
)
def test_failures_are_reported_and_tried_again(run, action, text):
    async def scenario():
        router = Router()
        router.script = [action]
        server = await router.serve()
        async with Worker(server.port) as worker:
            await worker.until_state(False, text)
            await worker.until_state(True, "registered")
        await server.close()

    run(scenario())


def test_a_router_that_does_not_answer(run, monkeypatch):
    monkeypatch.setattr(announce_module, "CONNECT_TIMEOUT_S", 0.2)

    async def scenario():
        router = Router()
        router.script = ["silence"]
        server = await router.serve()
        async with Worker(server.port) as worker:
            await worker.until_state(False, "no answer to REGISTER within 0.2 s")
            await worker.until_state(True, "registered")
        await server.close()

    run(scenario())


def test_stop_ends_a_long_wait_at_once(run, monkeypatch):
    monkeypatch.setattr(announce_module, "MIN_BACKOFF_S", 1000.0)

    async def scenario():
        router = Router(lease_s=3000.0)
        server = await router.serve()
        async with Worker(server.port) as worker:
            await worker.until_state(True, "registered")
        await server.close()
        async with Worker(server.port) as worker:
            await worker.until_state(False, "cannot connect")

    run(scenario())


def test_stop_before_the_start(run):
    async def scenario():
        worker = Worker(1)
        worker.stop.set()
        async with worker:
            pass
        assert [state for state, _ in worker.states] == [False]

    run(scenario())


def test_over_tls(run, tls):
    async def scenario():
        router = Router()
        server = await router.serve(tls=tls.server)
        async with Worker(server.port, tls.client) as worker:
            assert await router.received.get() == REGISTER
            await worker.until_state(True, "registered")
        async with Worker(server.port) as plain:
            await plain.until_state(False, "uses TLS and the peer does not")
        await server.close()

    run(scenario())
