"""A real browser, where one is installed: Debian's chromium, without a window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def browser() -> Iterator[Browser]:
    """One that ends with the context."""
    assert CHROMIUM is not None
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=Path(CHROMIUM), args=list(_FLAGS))
        yield opened
        opened.close()
