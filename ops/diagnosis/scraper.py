"""Asks services for /healthz and /metrics. Whatever answers, each question ends soon and small."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from ops.diagnosis.exposition import Exposition, parse_exposition
from ops.diagnosis.json_path import text_at
from ops.diagnosis.snapshot import ROLES, Snapshot

# For both questions of a snapshot together: a service that needs longer has a problem itself.
SNAPSHOT_TIMEOUT_S: Final = 1.5
# A worker's metrics are some tens of kilobytes.
MAX_ANSWER_NBYTES: Final = 4 * 1024 * 1024
_PIECE_NBYTES: Final = 64 * 1024
_MAX_SHOWN_CHARACTERS: Final = 200


class ScrapeFailure(Exception):
    """A service did not answer as one of ours does; the text is a clause that says how."""


class Scraper:
    """Use it as an async context manager.

    Args:
        api_key: sent to the router alone.
        timeout_s: of a snapshot, and of one round trip.
    """

    def __init__(
        self, api_key: bytes | None = None, *, timeout_s: float = SNAPSHOT_TIMEOUT_S
    ) -> None:
        # Bytes that are no UTF-8 are refused by the router like any other wrong key.
        key = (api_key or b"").decode("utf-8", errors="replace")
        self._router_headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Scraper":
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def snapshot(self, url: str, *, is_router: bool = False) -> Snapshot:
        """The service at ``url``.

        ScrapeFailure if /healthz cannot be had. Metrics that cannot be had are left out, and
        ``metrics_problem`` says why.
        """
        deadline_at = time.monotonic() + self._timeout_s
        health = await self._health(url, is_router=is_router, deadline_at=deadline_at)
        metrics, problem = Exposition(), ""
        try:
            body = await self._get(f"{url}/metrics", is_router=is_router, deadline_at=deadline_at)
            metrics = parse_exposition(body.decode("utf-8", errors="replace"))
        except ScrapeFailure as exc:
            problem = str(exc)
        except ValueError as exc:
            problem = f"its answer is {exc}"
        role = "router" if is_router else _role(health, metrics)
        name = "router" if is_router else text_at(health, "instance_id") or url
        return Snapshot(url, role, name, time.monotonic(), health, metrics, problem)

    async def round_trip_s(self, url: str) -> float:
        """Seconds from asking for /healthz to the whole answer, by this process's clock.

        ScrapeFailure as for ``snapshot``.
        """
        began_at = time.monotonic()
        await self._get(f"{url}/healthz", is_router=False, deadline_at=began_at + self._timeout_s)
        return time.monotonic() - began_at

    async def _health(self, url: str, *, is_router: bool, deadline_at: float) -> Mapping[str, Any]:
        body = await self._get(f"{url}/healthz", is_router=is_router, deadline_at=deadline_at)
        try:
            health = json.loads(body)
        except (ValueError, RecursionError) as exc:
            raise ScrapeFailure("its /healthz is not JSON") from exc
        if not isinstance(health, dict) or not isinstance(health.get("state"), str):
            raise ScrapeFailure("its /healthz is not that of a service of ours")
        return health

    async def _get(self, url: str, *, is_router: bool, deadline_at: float) -> bytes:
        assert self._http is not None, "used outside its context"
        headers = self._router_headers if is_router else {}
        try:
            async with asyncio.timeout(max(0.0, deadline_at - time.monotonic())):
                # A redirect would carry the key to wherever it points.
                async with self._http.get(url, headers=headers, allow_redirects=False) as response:
                    return await _body(response)
        except TimeoutError as exc:
            raise ScrapeFailure(f"it did not answer within {self._timeout_s:g} s") from exc
        except aiohttp.ClientConnectorError as exc:
            raise ScrapeFailure(f"nothing is listening there ({exc.os_error})") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise ScrapeFailure(f"the connection failed: {_shortened(str(exc))}") from exc


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if response.status != 200:
        raise ScrapeFailure(f"it answered {response.status} ({_shortened(response.reason or '-')})")
    body = bytearray()
    async for piece in response.content.iter_chunked(_PIECE_NBYTES):
        body += piece
        if len(body) > MAX_ANSWER_NBYTES:
            raise ScrapeFailure(f"its answer is larger than {MAX_ANSWER_NBYTES} bytes")
    return bytes(body)


def _role(health: Mapping[str, Any], metrics: Exposition) -> str:
    """What it says it is; a version that says nothing is known by the names of its metrics."""
    role = text_at(health, "role")
    if role in ROLES:
        return role
    for role in ROLES:
        if any(family.startswith(f"pd_{role}_") for family in metrics.families):
            return role
    return ""


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "…"
