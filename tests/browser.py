"""A headless Chromium for the tests of pages, by Playwright.

Tests skip where there is none; with `SIMDIST_NEEDS_BROWSER` in the environment, as .ci/run sets it, they fail.
"""

import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WINDOW = {"viewport": {"width": 1200, "height": 900}, "color_scheme": "light"}
TIMEOUT_MS = 60_000
NEEDED = "SIMDIST_NEEDS_BROWSER"


def executable() -> str | None:
    """Return the browser that the system has."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def require() -> str:
    """Return the browser that the system has; without one, or without Playwright, skip or fail."""
    path = executable()
    if path is not None and importlib.util.find_spec("playwright") is not None:
        return path
    missing = "needs playwright" if path else f"needs a browser: one of {', '.join(NAMES)}"
    if os.environ.get(NEEDED):
        pytest.fail(f"{missing}; {NEEDED} is set, so this is no reason to skip")
    pytest.skip(missing)


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Start a browser; it ends with the block."""
    path = require()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS), timeout=TIMEOUT_MS)
        browser.new_page(**WINDOW)  # `opened` shows one file after the other there: a new page takes five times as long
        try:
            yield browser
        finally:
            browser.close()


def wait_until(page: "Page", condition: str) -> None:
    """Wait until an expression of JavaScript holds in a page.

    The `wait_for_function` of Playwright evaluates text inside the page, which the page's own policy refuses.
    """
    end_s = time.monotonic() + TIMEOUT_MS / 1e3
    while not page.evaluate(condition):
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {TIMEOUT_MS / 1e3:g} s: {condition}")
        page.wait_for_timeout(20)


@dataclass(frozen=True)
class Watched:
    """A page, with all that it asked for and complained about."""

    page: "Page"
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: "Browser", path: Path, **settings: object) -> Iterator[Watched]:
    """Open a page from its file; at the end it must have asked for nothing else, and have had no complaint.

    Args:
        browser: Where to open it: in its first page, if that can have the settings.
        path: The file.
        settings: Those of a Playwright context, such as `color_scheme` and `viewport`.
    """
    own = browser.new_page(**WINDOW | settings) if settings.keys() - WINDOW.keys() else None
    watched = Watched(own or browser.contexts[0].pages[0])
    page, url = watched.page, path.as_uri()
    listeners = {
        "request": lambda request: watched.requests.append(request.url),
        "console": lambda message: watched.complaints.append(message.text),
        "pageerror": lambda error: watched.complaints.append(str(error)),
        "dialog": lambda dialog: (watched.complaints.append(dialog.message), dialog.dismiss()),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.set_default_timeout(TIMEOUT_MS)
    page.set_viewport_size((WINDOW | settings)["viewport"])
    page.emulate_media(color_scheme=(WINDOW | settings)["color_scheme"])
    try:
        page.goto(url)
        yield watched
        assert watched.requests == [url]
        assert watched.complaints == []
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        page.close() if own else page.goto("about:blank")
