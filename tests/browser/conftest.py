"""Fixtures of the browser tests. They last a module: the driver's event loop must not stay open
for tests of others, which run notebooks in event loops of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from driving import Lab, headless_chromium, running_lab

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    with headless_chromium() as chromium:
        yield chromium


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page of a desktop's size, with no cookie of another test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


@pytest.fixture(scope="module")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a folder of its own; `browser` first, so that it is not started for a skip."""
    with running_lab(tmp_path_factory.mktemp("lab")) as server:
        yield server
