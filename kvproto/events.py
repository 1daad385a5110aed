"""What a connection tells its driver."""

from dataclasses import dataclass

from kvproto.errors import KvProtoError, LeaseError
from kvproto.messages import Hello, Message, Placed, Write


@dataclass(frozen=True, slots=True)
class HandshakeDone:
    """Both sides have checked each other; messages may be sent from now on."""

    remote: Hello
    version: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message. For a Write or Placed: its bytes are in the landing's memory and counted."""

    message: Message


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """A WRITE or PLACED had no permission; it was not counted and the sender was told."""

    write: Write | Placed
    error: LeaseError


@dataclass(frozen=True, slots=True)
class Ended:
    """The connection is over: always the last event. ``error`` says why."""

    error: KvProtoError


Event = HandshakeDone | MessageReceived | WriteRefused | Ended
