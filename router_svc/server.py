"""The HTTP server: routes, API key, error bodies, health."""

import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import structlog
from aiohttp import web

from router_svc.admission import Admission
from router_svc.config import RouterConfig
from router_svc.errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from router_svc.generate_api import GenerateApi
from router_svc.metrics import RouterMetrics
from router_svc.registry import WORKER_ROLES, WorkerRegistry
from router_svc.scheduler import longest_sequence_tokens
from router_svc.served_model import ServedModel
from svckit.admin import port_sentence
from svckit.errors import ServiceError
from svckit.lifecycle import Lifecycle
from svckit.metrics import METRICS_CONTENT_TYPE
from svckit.version import program_version

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GENERATE_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
# Probes carry no key; what they show without one is the state alone.
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_SHUTDOWN_TIMEOUT_S: Final = 2.0
_KEEPALIVE_TIMEOUT_S: Final = 75.0
# Never sent; the number that web servers use for it in logs and metrics.
_CLIENT_GONE: Final = 499


class RouterServer:
    """Serves the API on one port; `port` is the real one after `start`."""

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        api: GenerateApi,
        registry: WorkerRegistry,
        admission: Admission,
        metrics: RouterMetrics,
        lifecycle: Lifecycle,
        api_key: bytes | None,
    ) -> None:
        self.port = config.listen_port
        self._host = config.listen_host
        self._model = model
        self._api = api
        self._registry = registry
        self._admission = admission
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._api_key = api_key
        self._log = structlog.get_logger("router_svc.server")
        metrics.requests_in_flight.set_function(lambda: admission.num_in_flight)
        for role in WORKER_ROLES:
            metrics.workers.labels(role).set_function(partial(registry.num_offered, role))
        # handler_cancellation: a client that leaves cancels its handler, which sends ABORT.
        self._runner = web.AppRunner(
            self._make_app(),
            handler_cancellation=True,
            handle_signals=False,
            access_log=None,
            keepalive_timeout=_KEEPALIVE_TIMEOUT_S,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )

    async def start(self) -> None:
        """Listen; ServiceError names the port and the flag if it is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port)
        try:
            await site.start()
        except OSError as exc:
            await self._runner.cleanup()
            raise ServiceError(port_sentence(self._host, self.port, "--listen-port", exc)) from exc
        self.port = int(self._runner.addresses[0][1])
        self._log.info("http port open", port=self.port)

    def cut_off(self) -> None:
        """End all running answers with an error that says why."""
        self._api.cut_off()

    async def close(self) -> None:
        """Stop listening; handlers that still run are cancelled. Idempotent."""
        await self._runner.cleanup()

    def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._errors, self._gate])
        app.router.add_post("/v1/chat/completions", self._api.chat)
        app.router.add_post("/v1/completions", self._api.completions)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{model:.+}", self._show_model)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show_metrics)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every failure into OpenAI's error body, and count the answers."""
        try:
            response = await handler(request)
        except ApiError as exc:
            response = _error_response(exc)
        except web.HTTPException as exc:
            response = _error_response(_from_http_exception(request, exc))
            if "Allow" in exc.headers:
                response.headers["Allow"] = exc.headers["Allow"]
        except ConnectionError:
            # The client has gone; this answer only tells aiohttp that the request is over.
            if request.transport is not None:
                request.transport.abort()
            response = web.Response(status=_CLIENT_GONE)
        except Exception:
            self._log.exception("request failed", method=request.method, path=request.path)
            response = _error_response(InternalError("The router failed. Its log has the details."))
        if request.path in _GENERATE_PATHS:
            self._metrics.requests.labels(str(response.status)).inc()
        if not self._lifecycle.is_ready and not response.prepared:
            response.force_close()
        return response

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the API key, then whether new work is taken."""
        if request.path not in _OPEN_PATHS and not self._has_key(request):
            raise UnauthorizedError(
                "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
            )
        if request.path in _GENERATE_PATHS and not self._lifecycle.is_ready:
            raise UnavailableError(
                f"The router is {self._lifecycle.state.value}. Try again shortly."
            )
        return await handler(request)

    def _has_key(self, request: web.Request) -> bool:
        if self._api_key is None:
            return True
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # surrogateescape: header bytes that are not UTF-8 must compare unequal, not raise.
        given = key.strip().encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self._api_key) and scheme.lower() == "bearer"

    async def _list_models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_json()]})

    async def _show_model(self, request: web.Request) -> web.Response:
        self._api.check_model(request.match_info["model"])
        return web.json_response(self._model_json())

    def _model_json(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created_at_unix_s,
            "owned_by": "pdserve",
            "max_model_len": longest_sequence_tokens(
                self._registry.views(), self._model.max_model_len
            ),
        }

    async def _healthz(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = {"state": self._lifecycle.state.value}
        if self._has_key(request):
            body |= {
                "version": program_version(),
                "model": self._model.name,
                "is_ready": self._is_ready(),
                "num_requests_in_flight": self._admission.num_in_flight,
                "workers": self._registry.health(),
            }
        return web.json_response(body)

    async def _readyz(self, _request: web.Request) -> web.Response:
        status = 200 if self._is_ready() else 503
        body: dict[str, Any] = {"state": self._lifecycle.state.value}
        for role in WORKER_ROLES:
            body[f"num_{role}_workers"] = self._registry.num_offered(role)
        return web.json_response(body, status=status)

    def _is_ready(self) -> bool:
        return self._lifecycle.is_ready and all(
            self._registry.num_offered(role) > 0 for role in WORKER_ROLES
        )

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.metrics.render(), headers={"Content-Type": METRICS_CONTENT_TYPE}
        )


def _error_response(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.http_status, headers=error.headers())


def _from_http_exception(request: web.Request, exc: web.HTTPException) -> ApiError:
    """Map what aiohttp itself refuses: unknown paths and methods, mostly."""
    where = f"{request.method} {request.path[:200]}"
    if exc.status == 404:
        return NotFoundError(f"There is no {where}. See docs/api.md.", code="path_not_found")
    if exc.status == 405:
        return InvalidRequestError(f"{where} is not allowed. See docs/api.md.", http_status=405)
    return InvalidRequestError(f"{where} was refused: {exc.reason}.", http_status=exc.status)
