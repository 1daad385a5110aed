"""The wire protocol of the three services: frames, messages, handshake, leases.

The core (everything but ``tcp`` and ``announce``) does no I/O and reads no clock: bytes in,
events and bytes out. ``docs/wire.md`` is the normative description. Import the modules by name.
"""
