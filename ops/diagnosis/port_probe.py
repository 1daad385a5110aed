"""Whether a worker's own port can be reached from here: connect, and close at once."""

import asyncio
from contextlib import suppress
from typing import Final

_TIMEOUT_S: Final = 1.5


async def port_problem(address: str) -> str:
    """Why nothing can connect to ``address`` (host:port) from here; "" if it can."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return "its address is none"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no connection within {_TIMEOUT_S:g} s"
    except (OSError, OverflowError, UnicodeError) as exc:
        return str(exc)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ""
