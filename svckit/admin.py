"""The admin port: /metrics, /healthz and /readyz.

/healthz is 200 as long as the event loop turns, with the state and the service's own facts;
/readyz is 200 only while new work is accepted.
"""

import errno
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from svckit.errors import ServiceError
from svckit.lifecycle import Lifecycle
from svckit.metrics import METRICS_CONTENT_TYPE, render

_SHUTDOWN_TIMEOUT_S: Final = 1.0

Health = Callable[[], Mapping[str, Any]]


def add_admin_routes(
    app: web.Application, registry: CollectorRegistry, lifecycle: Lifecycle, health: Health
) -> None:
    """Add the three routes to ``app``, for a service that has an HTTP port of its own.

    ``health`` returns JSON-ready facts and must not block.
    """

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=render(registry), headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def healthz(_request: web.Request) -> web.Response:
        return web.json_response({"state": lifecycle.state.value, **health()})

    async def readyz(_request: web.Request) -> web.Response:
        status = 200 if lifecycle.is_ready else 503
        return web.json_response({"state": lifecycle.state.value}, status=status)

    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)


class AdminServer:
    """An HTTP server for the three routes alone; ``port`` is the real one after ``start``."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        lifecycle: Lifecycle,
        health: Health,
    ) -> None:
        self.host = host
        self.port = port
        app = web.Application()
        add_admin_routes(app, registry, lifecycle, health)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S, handle_signals=False
        )

    async def start(self) -> None:
        """Listen; ServiceError names the port and the flag if it is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        try:
            await site.start()
        except OSError as exc:
            await self._runner.cleanup()
            raise ServiceError(port_sentence(self.host, self.port, "--admin-port", exc)) from exc
        self.port = int(self._runner.addresses[0][1])
        structlog.get_logger("svckit.admin").info("admin port open", port=self.port)

    async def close(self) -> None:
        """Stop listening and wait for running answers; idempotent."""
        await self._runner.cleanup()


def port_sentence(host: str, port: int, flag: str, error: OSError) -> str:
    """The one sentence for a port that cannot be opened, naming it and its flag."""
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is already in use; choose another one with {flag}."
    return f"Cannot listen on {host}:{port} ({flag}): {error.strerror or error}."
