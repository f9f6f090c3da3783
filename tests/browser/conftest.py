"""Fixtures of the browser tests. They last a module: the driver's event loop must not stay open
for tests of others, which run notebooks in event loops of their own."""

import pytest
from driving import headless_chromium, running_lab


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    with headless_chromium() as chromium:
        yield chromium


@pytest.fixture
def page(browser):
    """A fresh page of a desktop's size, with no cookie of another test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


@pytest.fixture
def asked(page):
    """The addresses that the page asks for."""
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    return asked


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """JupyterLab on a folder of its own; `browser` first, so that it is not started for a skip."""
    with running_lab(tmp_path_factory.mktemp("lab")) as found:
        yield found
