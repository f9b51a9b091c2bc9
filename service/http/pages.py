"""Pages for people: the playground at `/`, and `/docs`. Neither needs a third-party host.

The playground is plain files, in `playground` as browsers get them; Swagger UI comes from an installed package.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse, HTMLResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PLAYGROUND: Final = Path(__file__).with_name("playground")
_PLAYGROUND_ASSETS: Final = "/assets"
_DOCS_ASSETS: Final = "/docs/assets"
_PLAYGROUND_HEADERS: Final = {
    # Asked again each time, so that a page never meets the modules of another version.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_pages(app: FastAPI) -> None:
    """Adds `/` and `/docs`."""
    app.mount(_PLAYGROUND_ASSETS, _WithHeaders(StaticFiles(directory=_PLAYGROUND / "assets"), _PLAYGROUND_HEADERS))
    app.mount(_DOCS_ASSETS, StaticFiles(packages=[("fastapi_swagger", "resources")]))

    @app.get("/", include_in_schema=False)
    async def playground() -> FileResponse:
        return FileResponse(_PLAYGROUND / "index.html", headers=_PLAYGROUND_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url=f"{_DOCS_ASSETS}/swagger-ui-bundle.js".lstrip("/"),
            swagger_css_url=f"{_DOCS_ASSETS}/swagger-ui.css".lstrip("/"),
            swagger_favicon_url=f"{_DOCS_ASSETS}/favicon-32x32.png".lstrip("/"),
            swagger_ui_parameters={"tryItOutEnabled": True, "displayRequestDuration": True},
        )


@final
class _WithHeaders:
    """An application whose every answer has these headers."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str]) -> None:
        self._app = app
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await self._app(scope, receive, send_with_headers)
