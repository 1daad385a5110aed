"""Transfer engines of others, on paths that need no RDMA card: Mooncake on TCP, NIXL on UCX.

Both write one-sidedly: the receiver registers its memory and only waits. Registration and the
exchange of addresses happen before anything is timed.
"""

from __future__ import annotations

import base64
import ctypes
import os
import socket
from typing import Any, ClassVar

from bench.transfer.channel import Channel
from bench.transfer.contestant import Contestant, Medium, Unavailable

_INSTALL = "pip install pdserve[bench]"


def address(memory: memoryview) -> int:
    """Address of the first byte; also of memory that is read-only to Python."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class MooncakeTcp(Contestant):
    """Mooncake's transfer engine, its TCP transport, peer-to-peer metadata."""

    name: ClassVar[str] = "Mooncake TCP"
    medium = Medium.TCP

    def check(self) -> None:
        """Needs the package mooncake-transfer-engine-non-cuda, and libibverbs to load it."""
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("GLOG_minloglevel", "2")
        # Otherwise it insists on RDMA devices.
        os.environ.setdefault("MC_FORCE_TCP", "1")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as exc:
            if "libibverbs" in str(exc) or "libnl" in str(exc):
                raise Unavailable("installed, but needs apt-get install libibverbs1") from None
            raise Unavailable(f"not installed: {_INSTALL}") from None
        self._engine: Any = TransferEngine()

    def serve(self, memory: memoryview, side: Channel) -> None:
        """Register the memory, say where it is, and wait."""
        self._initialize(memory)
        side.send(
            host=f"127.0.0.1:{self._engine.get_rpc_port()}",
            address=address(memory),
        )
        side.receive()

    async def connect(self, memory: memoryview, side: Channel) -> None:
        """Register ours too."""
        self._initialize(memory)
        self._remote = side.receive()
        self._address = address(memory)

    async def transfer(self, nbytes: int) -> None:
        """Complete when the engine says so."""
        status = self._engine.transfer_sync_write(
            self._remote["host"], self._address, self._remote["address"], nbytes
        )
        if status:
            raise ConnectionError(f"transfer_sync_write answered {status}")

    def _initialize(self, memory: memoryview) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        status = self._engine.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "tcp", "")
        if status:
            raise Unavailable(f"its engine did not start on TCP (initialize answered {status})")
        status = self._engine.register_memory(address(memory), memory.nbytes)
        if status:
            raise Unavailable(f"it refused our memory (register_memory answered {status})")


class Nixl(Contestant):
    """NIXL's agent with its UCX backend, restricted to one kind of transport."""

    ucx_tls: ClassVar[str]
    # UCX has no way to notice that a peer on shared memory died.
    error_handling: ClassVar[str] = "peer"

    def check(self) -> None:
        """Needs the package nixl-cu12; works without CUDA and without RDMA."""
        os.environ["UCX_TLS"] = self.ucx_tls
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        if "tcp" in self.ucx_tls:
            os.environ["UCX_NET_DEVICES"] = "lo"
        try:
            import nixl_cu12._api as api
        except ImportError:
            raise Unavailable(f"not installed: {_INSTALL}") from None
        self._api: Any = api

    def serve(self, memory: memoryview, side: Channel) -> None:
        """Register, exchange metadata, and wait; the agent's own thread makes progress."""
        agent = self._agent("receiver")
        registered = agent.register_memory([(address(memory), memory.nbytes, 0, "")], "DRAM")
        side.send(metadata=_text(agent.get_agent_metadata()), address=address(memory))
        agent.add_remote_agent(base64.b64decode(side.receive()["metadata"]))
        side.send(ready=True)
        try:
            side.receive()
        finally:
            agent.deregister_memory(registered)

    async def connect(self, memory: memoryview, side: Channel) -> None:
        """Register, exchange metadata."""
        self._sender = self._agent("sender")
        self._sender.register_memory([(address(memory), memory.nbytes, 0, "")], "DRAM")
        self._address = address(memory)
        remote = side.receive()
        self._remote_address = remote["address"]
        self._remote_name = self._sender.add_remote_agent(base64.b64decode(remote["metadata"]))
        if isinstance(self._remote_name, bytes):
            self._remote_name = self._remote_name.decode()
        side.ask(metadata=_text(self._sender.get_agent_metadata()))
        self._handle: Any = None

    async def prepare(self, nbytes: int) -> None:
        """Make the request; posting it is what is timed."""
        if self._handle is not None:
            self._sender.release_xfer_handle(self._handle)
        ours = self._sender.get_xfer_descs([(self._address, nbytes, 0)], "DRAM")
        theirs = self._sender.get_xfer_descs([(self._remote_address, nbytes, 0)], "DRAM")
        self._handle = self._sender.initialize_xfer("WRITE", ours, theirs, self._remote_name)

    async def transfer(self, nbytes: int) -> None:
        """Post, then poll until it is done, as its own examples do."""
        state = self._sender.transfer(self._handle)
        while state == "PROC":
            state = self._sender.check_xfer_state(self._handle)
            if state == "PROC":
                # Let the agent's own thread have this core.
                os.sched_yield()
        if state != "DONE":
            raise ConnectionError(f"the transfer ended as {state}")

    def _agent(self, name: str) -> Any:
        agent = self._api.nixl_agent(name, self._api.nixl_agent_config(backends=[]))
        agent.create_backend("UCX", {"ucx_error_handling_mode": self.error_handling})
        return agent


class NixlTcp(Nixl):
    """UCX on TCP."""

    name: ClassVar[str] = "NIXL UCX tcp"
    medium = Medium.TCP
    ucx_tls = "tcp,self"


class NixlSharedMemory(Nixl):
    """UCX between processes of one host."""

    name: ClassVar[str] = "NIXL UCX shm"
    medium = Medium.MAPPED
    ucx_tls = "sm,self"
    error_handling = "none"


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
