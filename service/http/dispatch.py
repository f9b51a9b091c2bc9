"""The way in: inference goes straight to its endpoint, everything else through FastAPI.

FastAPI's own layers cost an inference request more than decoding it does, and do nothing for it. Plain ASGI.
"""

from collections.abc import Sequence
from typing import final

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.boundary import Boundary
from service.metrics import Metrics
from service.traces import Traces


@final
class Dispatch:
    """An application in front of another, for the routes that have to be fast.

    Args:
        rest: answers what is none of these, wrong methods included.
        routes: whose endpoints are ASGI applications.
        metrics, traces: for the boundary around them.
    """

    def __init__(self, rest: ASGIApp, routes: Sequence[Route], metrics: Metrics, traces: Traces | None) -> None:
        self._rest = rest
        self._routes = routes
        # Most requests have a path without parameters, which needs no expression to be matched.
        self._exact = {route.path: route.endpoint for route in routes if "{" not in route.path}
        self._fast = Boundary(_call_endpoint, metrics, traces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers in one of the two ways."""
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._exact.get(scope["path"])
            if endpoint is not None:
                scope["endpoint"] = endpoint
                await self._fast(scope, receive, send)
                return
            for route in self._routes:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found)
                    await self._fast(scope, receive, send)
                    return
        await self._rest(scope, receive, send)


async def _call_endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    await scope["endpoint"](scope, receive, send)
