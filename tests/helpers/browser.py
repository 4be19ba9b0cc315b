"""A headless Chromium, where the machine has one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: pictures that tests take, for people to look at
PICTURES = Path(__file__).parents[2] / "out" / "screenshots"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's; skips the test where there is none to start."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = own if os.path.exists(own) else next(filter(None, map(shutil.which, NAMES)), None)
        if path is None:
            pytest.skip("no Chromium: neither playwright's own nor one on the path")
        # as root, as in a container, Chromium starts only without its sandbox
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
