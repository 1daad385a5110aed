"""The router process: STARTING, SERVING, DRAINING, STOPPED.

Start: model folder, tokenizer, control port, HTTP port. Drain: new requests get 503, running
ones finish within drain_timeout_s; then HTTP, control port and worker connections close.
"""

import asyncio
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

import structlog

from kvproto.errors import LocalProtocolError
from kvproto.handshake import Identity
from kvproto.tcp import Server as ControlServer
from kvproto.tcp import serve as serve_kvproto
from router_svc.admission import Admission
from router_svc.config import RouterConfig
from router_svc.control import ControlHandler
from router_svc.decode_pool import DecodePool
from router_svc.dispatch import Dispatcher, DispatchLimits
from router_svc.generate_api import GenerateApi
from router_svc.metrics import RouterMetrics
from router_svc.registry import CONFIG_DIGEST_FACT, WorkerRegistry
from router_svc.served_model import ServedModel, load_served_model
from router_svc.server import RouterServer
from router_svc.tokenizer import Tokenizer, TokenizerPool
from svckit.errors import ServiceError
from svckit.lifecycle import Lifecycle, Step
from svckit.secret import read_secret
from svckit.tls import load_tls

_MAX_TOKENIZER_THREADS: Final = 4
_CLOSE_TIMEOUT_S: Final = 5.0


async def serve(config: RouterConfig, lifecycle: Lifecycle) -> None:
    """Run the router until it has drained. Raises ServiceError if it cannot start."""
    model = load_served_model(config.model, name=config.served_model_name)
    # In a thread: signals must be seen while a large vocabulary is read.
    tokenizer = await asyncio.to_thread(Tokenizer.load, config.model)
    await RouterService(config, model, tokenizer, lifecycle).run()


class RouterService:
    """One router. `http_port` and `control_port` are the real ones while it is serving."""

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        tokenizer: Tokenizer,
        lifecycle: Lifecycle,
    ) -> None:
        self.http_port = config.listen_port
        self.control_port = config.control_port
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._lifecycle = lifecycle
        self._tls = load_tls(config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
        self._metrics = RouterMetrics()
        self._admission = Admission(config.max_requests)
        self._identity = Identity(
            role="router",
            instance_id=config.instance_id or "router",
            facts={CONFIG_DIGEST_FACT: model.config_digest},
            secret=config.secret,
        )
        self._log = structlog.get_logger("router_svc.service")

    async def run(self) -> None:
        """Serve until a drain is asked for, then drain and stop."""
        registry = WorkerRegistry(self._model.config_digest, clock=time.monotonic)
        num_threads = min(max(self._config.threads, 1), _MAX_TOKENIZER_THREADS)
        executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        try:
            async with DecodePool(registry, self._identity, tls=self._tls.client) as pool:
                await self._serve(registry, pool, executor)
        finally:
            # A thread that is inside the tokenizer cannot be stopped; nobody waits for it.
            executor.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, registry: WorkerRegistry, pool: DecodePool, executor: Executor) -> None:
        server = self._make_server(registry, pool, executor)
        control = await self._open_control_port(registry, pool)
        self.control_port = control.port
        try:
            await server.start()
            self.http_port = server.port
            self._log.info(
                "router serves",
                model=self._model.name,
                http_port=self.http_port,
                control_port=self.control_port,
            )
            self._lifecycle.advance(Step.READY)
            await self._lifecycle.wait_draining()
            await self._drain(server)
        finally:
            await server.close()
            await _close_control_port(control)

    async def _open_control_port(self, registry: WorkerRegistry, pool: DecodePool) -> ControlServer:
        handler = ControlHandler(registry, pool, lease_s=self._config.lease_s)
        try:
            return await serve_kvproto(
                self._config.control_host,
                self._config.control_port,
                identity=self._identity,
                handler=handler.handle,
                tls=self._tls.server,
            )
        except LocalProtocolError as exc:
            raise ServiceError(f"Cannot open the control port (--control-port): {exc}") from exc

    def _make_server(
        self, registry: WorkerRegistry, pool: DecodePool, executor: Executor
    ) -> RouterServer:
        config = self._config
        limits = DispatchLimits(
            first_token_timeout_s=config.first_token_timeout_s,
            resume_timeout_s=config.resume_timeout_s,
            max_resumes=config.max_resumes,
        )
        api = GenerateApi(
            config,
            self._model,
            self._tokenizer,
            TokenizerPool(self._tokenizer, executor),
            registry,
            Dispatcher(registry, pool, self._metrics, limits),
            self._admission,
            self._metrics,
        )
        api_key = None if config.api_key_file is None else read_secret(config.api_key_file, {})
        return RouterServer(
            config,
            self._model,
            api,
            registry,
            self._admission,
            self._metrics,
            self._lifecycle,
            api_key,
        )

    async def _drain(self, server: RouterServer) -> None:
        self._log.info("draining", num_requests=self._admission.num_in_flight)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._admission.wait_idle()
        except TimeoutError:
            self._log.warning(
                "requests cut off by the drain deadline",
                num_requests=self._admission.num_in_flight,
                drain_timeout_s=self._config.drain_timeout_s,
            )
            server.cut_off()


async def _close_control_port(control: ControlServer) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await control.close()
    except TimeoutError:
        control.abort()
