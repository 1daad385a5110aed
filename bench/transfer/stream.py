"""Blocking sockets: the bare loop that is TCP's limit here, and the object formats on top of it.

Pickle appears here alone, to compare, on bytes that this benchmark made itself; nothing of the
project reads or writes it.
"""

from __future__ import annotations

import base64
import json
import pickle
import socket
from abc import abstractmethod
from typing import ClassVar

from bench.transfer.channel import Channel
from bench.transfer.contestant import Contestant, Medium, Unavailable

_SIZE_NBYTES = 8
_ACK = b"\x06"


class Stream(Contestant):
    """A connection on loopback; each transfer is a size, that many bytes, and one byte back."""

    def serve(self, memory: memoryview, side: Channel) -> None:
        """Accept one connection and take transfers until it ends."""
        listener = socket.create_server(("127.0.0.1", 0))
        side.send(port=listener.getsockname()[1])
        connected = listener.accept()[0]
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while size := connected.recv(_SIZE_NBYTES, socket.MSG_WAITALL):
            self.receive(connected, int.from_bytes(size, "little"), memory)
            connected.sendall(_ACK)

    async def connect(self, memory: memoryview, side: Channel) -> None:
        """Connect to the receiver."""
        self.memory = memory
        self._connected = socket.create_connection(("127.0.0.1", side.receive()["port"]))
        self._connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def transfer(self, nbytes: int) -> None:
        """Size, bytes, then wait for the answer."""
        body = self.encode(self.memory[:nbytes])
        self._connected.sendall(len(body).to_bytes(_SIZE_NBYTES, "little"))
        self._connected.sendall(body)
        if self._connected.recv(1) != _ACK:
            raise ConnectionError("the receiver went away")

    async def disconnect(self) -> None:
        """Close the connection."""
        self._connected.close()

    @abstractmethod
    def encode(self, payload: memoryview) -> bytes | bytearray | memoryview:
        """What goes on the connection."""

    @abstractmethod
    def receive(self, connected: socket.socket, nbytes: int, memory: memoryview) -> None:
        """Read ``nbytes`` and leave the payload at the begin of ``memory``."""


class BareSocket(Stream):
    """Straight from memory to memory: sendall and recv_into, nothing else."""

    name: ClassVar[str] = "bare socket"
    medium = Medium.LIMIT

    def encode(self, payload: memoryview) -> memoryview:
        """The bytes themselves."""
        return payload

    def receive(self, connected: socket.socket, nbytes: int, memory: memoryview) -> None:
        """Into place, as much at a time as the kernel has."""
        receive_into(connected, memory[:nbytes])


class ObjectStream(Stream):
    """The payload inside an encoded object, decoded at the receiver and copied into place."""

    medium = Medium.TEXT
    # A second a transfer beyond; the ratio no longer changes.
    max_nbytes = 256 << 20

    def receive(self, connected: socket.socket, nbytes: int, memory: memoryview) -> None:
        """Read all, decode, copy into place."""
        raw = bytearray(nbytes)
        receive_into(connected, memoryview(raw))
        payload = self.decode(raw)
        memory[: len(payload)] = payload

    @abstractmethod
    def decode(self, raw: bytearray) -> bytes:
        """The payload out of what ``encode`` made."""


class JsonBase64(ObjectStream):
    """A JSON object with the payload as base64 text."""

    name: ClassVar[str] = "JSON + base64"

    def encode(self, payload: memoryview) -> bytes:
        """Text of a map with one field."""
        return json.dumps({"kv": base64.b64encode(payload).decode("ascii")}).encode("ascii")

    def decode(self, raw: bytearray) -> bytes:
        """Parse, then decode the field."""
        return base64.b64decode(json.loads(raw)["kv"])


class Pickle(ObjectStream):
    """A pickled map with the payload as bytes; only ever of our own bytes, in this benchmark."""

    name: ClassVar[str] = "pickle"

    def encode(self, payload: memoryview) -> bytes:
        """Pickle of a map with one field."""
        return pickle.dumps({"kv": bytes(payload)}, protocol=pickle.HIGHEST_PROTOCOL)

    def decode(self, raw: bytearray) -> bytes:
        """Unpickle what ``encode`` made in our other process."""
        payload: bytes = pickle.loads(raw)["kv"]
        return payload


class Protobuf(ObjectStream):
    """A protobuf message with one bytes field."""

    name: ClassVar[str] = "protobuf"

    def check(self) -> None:
        """Needs the package protobuf."""
        try:
            from google.protobuf.wrappers_pb2 import BytesValue
        except ImportError:
            raise Unavailable("not installed: pip install protobuf") from None
        self._message = BytesValue

    def encode(self, payload: memoryview) -> bytes:
        """Serialise."""
        encoded: bytes = self._message(value=bytes(payload)).SerializeToString()
        return encoded

    def decode(self, raw: bytearray) -> bytes:
        """Parse."""
        payload: bytes = self._message.FromString(bytes(raw)).value
        return payload


def receive_into(connected: socket.socket, memory: memoryview) -> None:
    """Fill ``memory``; ConnectionError if the stream ends before."""
    while memory.nbytes:
        nbytes = connected.recv_into(memory)
        if not nbytes:
            raise ConnectionError("the sender went away")
        memory = memory[nbytes:]
