"""Structured logs on stderr: for people on a terminal, one JSON object a line elsewhere."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO

import structlog

# These log each request or each connection at INFO; our own events say the same in fewer lines.
_QUIET_LOGGERS: Final = ("aiohttp.access", "asyncio", "httpx", "urllib3", "filelock")


def configure_logging(
    service: str,
    level: str = "info",
    fmt: str = "auto",
    *,
    instance_id: str = "",
    stream: TextIO | None = None,
) -> None:
    """Send structlog and the standard library's logging to ``stream`` (default: stderr).

    ``fmt`` is auto, console or json; auto is console if the stream is a terminal. Every line
    carries ``service`` and, if given, ``instance_id``. Call it once, first thing in a process.
    """
    target = sys.stderr if stream is None else stream
    is_console = fmt == "console" or (fmt == "auto" and target.isatty())
    identity = {"service": service} | ({"instance_id": instance_id} if instance_id else {})

    def add_identity(
        _logger: object, _name: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        for key, value in identity.items():
            event.setdefault(key, value)
        return event

    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_identity,
        structlog.processors.UnicodeDecoder(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=_rendering(is_console, target)
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _rendering(is_console: bool, target: TextIO) -> list[structlog.types.Processor]:
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if is_console:
        return [remove_meta, structlog.dev.ConsoleRenderer(colors=target.isatty())]
    return [
        remove_meta,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(ensure_ascii=False),
    ]
