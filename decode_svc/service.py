"""The decode worker as a process: what starts, in which order, and what stops."""

import asyncio
import itertools
from functools import partial

import structlog

from decode_svc.config import POOL_DTYPE, DecodeConfig
from decode_svc.decoder import Decoder
from decode_svc.handoff import Fetcher
from decode_svc.letter_box import LetterBoxes
from decode_svc.metrics import DecodeMetrics
from decode_svc.path import TCP, PathChooser
from decode_svc.prefill_peers import PrefillPeers
from decode_svc.quarantine import Quarantine
from decode_svc.rdma_pool import RdmaPool
from decode_svc.sender_paths import SenderPaths
from decode_svc.server import DecodeServer
from decode_svc.shared_pool import SharedPool
from kvengine.engine import Engine
from kvengine.errors import EngineError
from kvproto.announce import announce
from kvproto.blocks import BlockPool
from kvproto.convert import RowConverter
from kvproto.description import describe
from kvproto.errors import LocalProtocolError
from kvproto.handshake import Identity
from kvproto.lease import LeaseTable
from kvproto.mapped_host import MappedHost
from kvproto.messages import Register
from kvproto.rdma.host import CARRIER as RDMA
from kvproto.rdma.host import RdmaHost
from kvproto.region import CARRIER as MAPPED
from kvproto.tcp import Server
from kvproto.tcp import serve as serve_tcp
from kvproto.tcp_link import Links
from svckit.admin import AdminServer
from svckit.errors import DrainDeadlineError, ServiceError
from svckit.lifecycle import Lifecycle, Step
from svckit.tls import TlsContexts, load_tls
from svckit.version import program_version


async def serve(config: DecodeConfig, lifecycle: Lifecycle) -> None:
    """Load the model, serve until a drain is asked for, finish what was taken on, stop.

    Raises ServiceError, checked in this order: TLS files, model, listening port, admin port.
    """
    tls = load_tls(config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
    shared, rdma = SharedPool(config), RdmaPool(config)
    try:
        engine = await asyncio.to_thread(_load_engine, config, shared)
        kv_pool = engine.kv_pool
        offered = (rdma.start(kv_pool.layout, kv_pool.region), await shared.start())
        hosts = [host for host in offered if host is not None]
        await _serve(config, lifecycle, tls, engine, hosts)
    finally:
        rdma.close()
        await shared.close()


async def _serve(
    config: DecodeConfig,
    lifecycle: Lifecycle,
    tls: TlsContexts,
    engine: Engine,
    hosts: list[RdmaHost | MappedHost],
) -> None:
    metrics = DecodeMetrics()
    identity = Identity(
        role="decode",
        instance_id=config.instance_id,
        facts=engine.facts.facts(),
        secret=config.secret,
        carriers=(*(host.carrier for host in hosts), TCP),
    )
    blocks = BlockPool(engine.num_blocks)
    leases = LeaseTable(
        engine.kv_pool.layout,
        engine.kv_pool.region,
        blocks,
        converter=RowConverter(),
        max_quarantined_blocks=config.max_quarantined_blocks or engine.num_blocks // 4,
    )
    metrics.quarantined_blocks.set_function(lambda: leases.stats()["num_quarantined_blocks"])
    boxes = LetterBoxes()
    quarantine = Quarantine(leases)
    new_generation = partial(next, itertools.count(1))
    paths = PathChooser(
        leases,
        blocks,
        engine.kv_pool.layout,
        boxes,
        quarantine,
        metrics,
        hosts=hosts,
        only=config.kv_carrier if config.kv_carrier in (RDMA, MAPPED) else "",
        new_generation=new_generation,
        min_bandwidth=config.min_handoff_bandwidth,
        timeout_s=config.connect_timeout_s,
    )
    peers = PrefillPeers(
        identity,
        leases,
        boxes,
        paths,
        connect_timeout_s=config.connect_timeout_s,
        max_lanes=config.max_lanes,
        tls=tls.client,
    )
    senders = SenderPaths(hosts, metrics, timeout_s=config.connect_timeout_s)
    fetcher = Fetcher(
        peers,
        boxes,
        leases,
        blocks,
        quarantine,
        metrics,
        senders=senders,
        new_generation=new_generation,
        wire_dtype="" if config.kv_wire_dtype == POOL_DTYPE else config.kv_wire_dtype,
        stall_timeout_s=config.stall_timeout_s,
        abort_timeout_s=config.abort_timeout_s,
    )
    decoder = Decoder(engine, blocks, fetcher, config, metrics)
    description = describe(
        engine.facts.geometry, model=engine.facts.name, max_model_len=engine.facts.max_model_len
    )
    server = DecodeServer(decoder, boxes, senders, metrics, description=description)
    listener = await _listen(config, identity, server, leases, tls)
    admin = AdminServer(
        "127.0.0.1",
        config.admin_port,
        metrics.registry,
        lifecycle,
        lambda: {
            "role": "decode",
            "instance_id": config.instance_id,
            "version": program_version(),
            "facts": engine.facts.facts(),
            "carriers": list(identity.carriers),
            "kv_carrier": config.kv_carrier,
            **decoder.stats(),
            "has_row_copies": engine.has_row_copies,
            "leases": leases.stats(),
            "is_over_quarantine_budget": leases.is_over_budget,
            "offers": {host.carrier: host.stats() for host in hosts},
            "routers": server.stats(),
            "clients": senders.stats(),
            "prefill_workers": peers.stats(),
        },
    )
    registration = Register(
        role="decode",
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
            connecting = tasks.create_task(peers.run(), name="prefill-peers")
            waiting = tasks.create_task(quarantine.run(), name="quarantine")
            decoding = tasks.create_task(decoder.run(), name="decode-loop")
            announcing = tasks.create_task(
                announce(
                    config.router_host,
                    config.router_port,
                    identity=identity,
                    registration=registration,
                    load=decoder.load,
                    stop=stop,
                    on_state=_log_registration,
                    tls=tls.client,
                ),
                name="announce",
            )
            lifecycle.advance(Step.READY)
            await lifecycle.wait_draining()
            decoder.is_draining = True
            try:
                async with asyncio.timeout(config.drain_timeout_s):
                    await decoder.wait_idle()
                    await server.flush()
            except TimeoutError as exc:
                raise DrainDeadlineError(
                    f"Sequences were still in work after drain_timeout_s "
                    f"({config.drain_timeout_s:g} s); they were aborted."
                ) from exc
            stop.set()
            await announcing
            decoding.cancel()
            connecting.cancel()
            waiting.cancel()
    finally:
        await listener.close()
        await admin.close()


def _load_engine(config: DecodeConfig, pool: SharedPool) -> Engine:
    try:
        engine = Engine.load(
            config.model,
            num_threads=config.threads,
            kv_pool_nbytes=config.kv_pool_nbytes,
            block_size=config.block_size,
            max_model_len=config.max_model_len or None,
            has_row_copies={"auto": None, "yes": True, "no": False}[config.row_copies],
            pool_memory=pool.take if pool.is_wanted else None,
        )
        engine.warm_up()
    except (EngineError, LocalProtocolError) as exc:
        raise ServiceError(str(exc)) from exc
    return engine


async def _listen(
    config: DecodeConfig,
    identity: Identity,
    server: DecodeServer,
    leases: LeaseTable,
    tls: TlsContexts,
) -> Server:
    try:
        return await serve_tcp(
            config.listen_host,
            config.listen_port,
            identity=identity,
            handler=Links(server.handle).handle,
            landing=leases,
            tls=tls.server,
        )
    except LocalProtocolError as exc:
        raise ServiceError(str(exc)) from exc


def _log_registration(is_registered: bool, text: str) -> None:
    log = structlog.get_logger("decode")
    (log.info if is_registered else log.warning)(
        "registration", is_registered=is_registered, detail=text
    )
