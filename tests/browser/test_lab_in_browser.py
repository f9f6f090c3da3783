"""JupyterLab as `make lab` starts it: for this machine only; nbval runs every notebook besides."""

from contextlib import suppress
from urllib.parse import urlsplit

import nbformat
import psutil
import pytest
from driving import NOTEBOOKS, errors_of, hold_picture

pytestmark = pytest.mark.browser
PROFILE = """import attnlib
def step(side):
    return sum(row * row for row in range(side))
attnlib.profile(step, 1000)"""
EXPLORE = """import attnlib

attnlib.explore("Llama-3.1-8B", release="0.6.3", batch=16, kv_len=8192)"""


def test_the_server_and_all_it_started_listen_on_this_machine_only(lab):
    assert urlsplit(lab.url).hostname in ("127.0.0.1", "localhost")
    server, found = psutil.Process(lab.pid), []
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            found += process.net_connections()
    addresses = {each.laddr.ip for each in found if each.status == "LISTEN"}
    assert addresses and addresses <= {"127.0.0.1", "::1"}


def test_a_notebook_runs_to_its_end_in_jupyterlab(lab, page, asked):
    path = NOTEBOOKS / "06_sparse_mla.ipynb"
    notebook = lab.run(page, *nbformat.read(path, as_version=4).cells)
    assert errors_of(notebook) == []
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    hosts = {urlsplit(url).hostname for url in asked if url.startswith("http")}
    assert hosts == {urlsplit(lab.url).hostname}


def test_a_profile_shows_itself_in_the_cell_that_took_it_and_a_cell_that_fails_is_noticed(
    lab, page
):
    notebook = lab.run(page, PROFILE, "1 / 0", "2 + 2")
    assert errors_of(notebook) == ["ZeroDivisionError: division by zero"]
    assert "step" in page.locator(".attnlib-card h4").inner_text()


def test_the_explorer_shows_the_times_of_readmes_picture_and_its_controls_change_its_view(
    lab, page
):
    page.set_viewport_size({"width": 1130, "height": 1000})
    assert errors_of(lab.run(page, EXPLORE)) == []
    cell, figure = page.locator(".jp-CodeCell"), page.locator(".attn-explorer-figure img")
    box, chart = cell.bounding_box(), figure.bounding_box()
    box["height"] = chart["y"] + chart["height"] - box["y"]
    hold_picture("explorer.png", page.screenshot(clip=box), figure.get_attribute("alt"))
    view, control = page.locator(".attn-explorer-view"), page.get_by_label("KV length")
    view.get_by_role("table").first.wait_for()
    before, now = view.inner_text(), control.input_value()
    other = [o for o in control.locator("option").all_inner_texts() if o != now][-1]
    control.select_option(label=other)
    page.wait_for_function(
        "before => document.querySelector('.attn-explorer-view').innerText !== before", arg=before
    )
    assert control.input_value() != now and "kv_len" in view.inner_text()
