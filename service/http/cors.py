"""Answers that browsers show to pages from elsewhere: none, unless origins are named."""

from collections.abc import Sequence
from typing import Final, final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.extensions import RESPOND

_EXPOSED: Final = (
    "X-Request-Id", "Server-Timing", "MHA-Model", "MHA-Version", "Inference-Header-Content-Length", "Retry-After",
)  # fmt: skip


@final
class Cors:
    """Wraps the application: pages from these origins may use all of it; `*` is every origin."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = CORSMiddleware(
            app, origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=_EXPOSED, max_age=600
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as the application, with the headers that browsers want."""
        if RESPOND in scope.get("extensions", {}):
            # An answer that is written at once would get by without those headers.
            others = {name: extension for name, extension in scope["extensions"].items() if name != RESPOND}
            scope = {**scope, "extensions": others}
        await self._app(scope, receive, send)
