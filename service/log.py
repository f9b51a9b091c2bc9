"""Log lines: JSON for machines, colours on a terminal; the same for our events and for uvicorn's.

A line never holds tensor content, keys or query strings. Our own events go straight to standard output, because every
request has one; what libraries log through the standard library takes the longer way to the same format.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any, Literal, final

import orjson
import structlog


def configure_logging(level: str, log_format: Literal["auto", "json", "console"]) -> None:
    """Sends every log line of the process to stdout in one format. Called once, by the command."""
    console = log_format == "console" or (log_format == "auto" and sys.stdout.isatty())
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(serializer=_to_json)
    )
    structlog.configure(
        processors=[*shared, renderer],
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(allow=[]), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    # uvicorn's own start and stop lines say less than ours.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))


def _to_json(event: dict[str, Any], **_: Any) -> str:
    return orjson.dumps(event, default=str).decode()


@final
class Sampled:
    """Lines that may come by the thousand: one each `period_s` is written, and tells how many were not.

    Args:
        period_s: seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, period_s: float, clock: Callable[[], float]) -> None:
        self._period_s = period_s
        self._clock = clock
        self._next_s = clock()
        self._unlogged = 0

    def turn(self) -> int | None:
        """How many lines were left out since the last one, or None if this one is to be left out, too."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._unlogged += 1
            return None
        unlogged, self._unlogged = self._unlogged, 0
        self._next_s = now_s + self._period_s
        return unlogged
