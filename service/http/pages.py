"""Pages for people. `/docs` needs no third-party host: Swagger UI comes from an installed package."""

from typing import Final

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

_ASSETS: Final = "/docs/assets"


def add_pages(app: FastAPI) -> None:
    """Adds `/docs`."""
    app.mount(_ASSETS, StaticFiles(packages=[("fastapi_swagger", "resources")]))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js".lstrip("/"),
            swagger_css_url=f"{_ASSETS}/swagger-ui.css".lstrip("/"),
            swagger_favicon_url=f"{_ASSETS}/favicon-32x32.png".lstrip("/"),
            swagger_ui_parameters={"tryItOutEnabled": True, "displayRequestDuration": True},
        )
