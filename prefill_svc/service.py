"""The prefill worker as a process: what starts, in which order, and what stops."""

import asyncio

import structlog

from kvengine.engine import Engine
from kvengine.errors import EngineError
from kvproto.announce import announce
from kvproto.convert import CONVERTIBLE
from kvproto.description import describe
from kvproto.errors import LocalProtocolError
from kvproto.handshake import DEFAULT_MAX_PAYLOAD_NBYTES, Identity
from kvproto.messages import Register
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.region import CARRIER as MAPPED
from kvproto.region import unavailable_reason
from kvproto.tcp import Server
from kvproto.tcp import serve as serve_tcp
from kvproto.tcp_link import Links
from prefill_svc.config import PrefillConfig
from prefill_svc.metrics import PrefillMetrics
from prefill_svc.prefiller import Prefiller
from prefill_svc.rdma_pool import RdmaPool
from prefill_svc.server import PrefillServer
from svckit.admin import AdminServer
from svckit.errors import DrainDeadlineError, ServiceError
from svckit.lifecycle import Lifecycle, Step
from svckit.tls import TlsContexts, load_tls
from svckit.version import program_version

# The largest payload a peer accepts, less room for the descriptor.
_MAX_BODY_NBYTES = DEFAULT_MAX_PAYLOAD_NBYTES - 4096


async def serve(config: PrefillConfig, lifecycle: Lifecycle) -> None:
    """Load the model, serve until a drain is asked for, finish what was taken on, stop.

    Raises ServiceError, checked in this order: TLS files, model, step size, listening port,
    admin port.
    """
    tls = load_tls(config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
    engine = await asyncio.to_thread(_load_engine, config)
    _check_step(engine, config)
    rdma = RdmaPool(config)
    rdma.start(engine.kv_pool.region)
    try:
        await _serve(config, lifecycle, tls, engine, rdma)
    finally:
        rdma.close()


async def _serve(
    config: PrefillConfig,
    lifecycle: Lifecycle,
    tls: TlsContexts,
    engine: Engine,
    rdma: RdmaPool,
) -> None:
    metrics = PrefillMetrics()
    prefiller = Prefiller(engine, config, metrics)
    server = PrefillServer(
        prefiller,
        metrics,
        geometry=engine.facts.geometry,
        description=describe(
            engine.facts.geometry, model=engine.facts.name, max_model_len=engine.facts.max_model_len
        ),
        config=config,
        rdma=rdma,
    )
    carriers = [RDMA] if rdma.is_open else []
    carriers += [] if unavailable_reason() else [MAPPED]
    identity = Identity(
        role="prefill",
        instance_id=config.instance_id,
        facts=engine.facts.facts(),
        secret=config.secret,
        dtypes=tuple(sorted(CONVERTIBLE)),
        carriers=(*carriers, "tcp"),
    )
    listener = await _listen(config, identity, server, tls)
    admin = AdminServer(
        "127.0.0.1",
        config.admin_port,
        metrics.registry,
        lifecycle,
        lambda: {
            "role": "prefill",
            "instance_id": config.instance_id,
            "version": program_version(),
            "facts": engine.facts.facts(),
            "carriers": list(identity.carriers),
            **prefiller.stats(),
            "rdma": rdma.stats(),
        },
    )
    registration = Register(
        role="prefill",
        instance_id=config.instance_id,
        host=config.advertise_host or config.listen_host,
        port=listener.port,
        model=engine.facts.name,
        facts=engine.facts.facts(),
        max_model_len=engine.facts.max_model_len,
        num_blocks=engine.num_blocks,
        block_size=config.block_size,
    )
    stop = asyncio.Event()
    try:
        await admin.start()
        async with asyncio.TaskGroup() as tasks:
            computing = tasks.create_task(prefiller.run(), name="prefill-loop")
            announcing = tasks.create_task(
                announce(
                    config.router_host,
                    config.router_port,
                    identity=identity,
                    registration=registration,
                    load=prefiller.load,
                    stop=stop,
                    on_state=_log_registration,
                    tls=tls.client,
                ),
                name="announce",
            )
            lifecycle.advance(Step.READY)
            await lifecycle.wait_draining()
            prefiller.is_draining = True
            try:
                async with asyncio.timeout(config.drain_timeout_s):
                    await prefiller.wait_idle()
            except TimeoutError as exc:
                raise DrainDeadlineError(
                    f"Prompts were still in work after drain_timeout_s "
                    f"({config.drain_timeout_s:g} s); they were aborted."
                ) from exc
            stop.set()
            await announcing
            computing.cancel()
    finally:
        await listener.close()
        await admin.close()


def _load_engine(config: PrefillConfig) -> Engine:
    try:
        engine = Engine.load(
            config.model,
            num_threads=config.threads,
            kv_pool_nbytes=config.kv_pool_nbytes,
            block_size=config.block_size,
            max_model_len=config.max_model_len or None,
        )
        engine.warm_up()
    except EngineError as exc:
        raise ServiceError(str(exc)) from exc
    return engine


def _check_step(engine: Engine, config: PrefillConfig) -> None:
    """One layer of one chunk is one frame, which the peer must accept."""
    geometry = engine.facts.geometry
    max_step_tokens = min(
        _MAX_BODY_NBYTES // max(1, geometry.write_nbytes(layer, 1))
        for layer in range(geometry.num_layers)
    )
    if config.max_step_tokens > max_step_tokens:
        raise ServiceError(
            f"max_step_tokens is {config.max_step_tokens}, but a frame holds {max_step_tokens} "
            f"tokens of a layer of {engine.facts.name}; set max_step_tokens to at most that."
        )


async def _listen(
    config: PrefillConfig, identity: Identity, server: PrefillServer, tls: TlsContexts
) -> Server:
    try:
        return await serve_tcp(
            config.listen_host,
            config.listen_port,
            identity=identity,
            handler=Links(server.handle).handle,
            tls=tls.server,
        )
    except LocalProtocolError as exc:
        raise ServiceError(str(exc)) from exc


def _log_registration(is_registered: bool, text: str) -> None:
    log = structlog.get_logger("prefill")
    (log.info if is_registered else log.warning)(
        "registration", is_registered=is_registered, detail=text
    )
