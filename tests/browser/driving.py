"""What browser tests share: Debian's Chromium, axe, and a JupyterLab that `make lab` started.

Where Chromium or its driver is missing, tests skip and say what to install; with
ATTNLIB_BROWSER=required they fail instead, so that CI cannot lose them unnoticed.
"""

import importlib.util
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image, PngImagePlugin

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
PICTURES = ROOT / "data" / "figures"
MOST_BYTES = 60_000
COLOURS = 256
TAKE = "ATTNLIB_PICTURES=new python -m pytest tests/browser"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = ("playwright", "axe_playwright_python")
START_S = 60
RUN_S = 180
STEP_S = 0.2
SEVERE = ("serious", "critical")
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
"""JupyterLab's own: no dialog over the notebook, no request to the net, and every cell in the page,
not only those in view."""
READY = re.compile(r"Python 3.* \| Idle")
ALL_RUN = r"""() => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
        .map(each => each.textContent).filter(text => text.includes('['));
    return prompts.length && /\d/.test(prompts[0]) && !prompts.some(text => text.includes('*'));
}"""
"""Whether the first cell has run and none waits or runs: a cell that fails frees all after it."""
SWITCHES = ("ATTNLIB_DATA", "ATTNLIB_MACHINE", "JUPYTER_TOKEN", "MAKEFLAGS")
"""What would change the lab: the test's own data folder, the caller's switches, an outer make's."""


def chromium_or_skip():
    """Chromium's path; skips without it or its driver, fails where browsers are required."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if found and not lacking:
        return found
    installs = ("Chromium: apt-get install chromium", f"{lacking}: pip install -r requirements.txt")
    reason = f"needs {installs[bool(lacking)]}"
    (pytest.fail if os.environ.get("ATTNLIB_BROWSER") == "required" else pytest.skip)(reason)


@contextmanager
def headless_chromium():
    """The system's Chromium, driven; root needs it without its sandbox."""
    path = chromium_or_skip()
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


def severe_violations(page, **options):
    """What axe-core finds serious or critical on the page as it is shown: rule, impact, where."""
    from axe_playwright_python.sync_playwright import Axe

    answer = Axe().run(page, options={"resultTypes": ["violations"], **options}).response
    severe = [rule for rule in answer["violations"] if rule["impact"] in SEVERE]
    return [f"{r['id']} ({r['impact']}): {r['nodes'][0]['html'][:200]}" for r in severe]


def hold_picture(name, shot, words):
    """README's picture of this name shows `words`, as the page does now.

    With ATTNLIB_PICTURES=new the screenshot becomes that picture first, in few colours and with the
    words in it as text: pixels are another Chromium's or font's, so they are not compared.
    """
    path = PICTURES / name
    if os.environ.get("ATTNLIB_PICTURES") == "new":
        info = PngImagePlugin.PngInfo()
        info.add_itxt("words", words)
        image = Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, dither=0)
        image.save(path, optimize=True, pnginfo=info)
    with Image.open(path) as picture:
        assert picture.text["words"] == words, f"{name} is old; take it anew: {TAKE}"
    assert path.stat().st_size <= MOST_BYTES


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab on a copy of the notebooks: what its own runtime file says of it."""

    url: str
    token: str
    pid: int
    folder: Path

    def run(self, page, *cells):
        """Run > Run All Cells in a new notebook of these, until each has run or one has failed.

        A string is a code cell; outputs are taken off before.
        """
        name = f"{time.monotonic_ns()}.ipynb"
        cells = [new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
        for cell in cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
        nbformat.write(notebook, self.folder / name)
        page.goto(f"{self.url}lab/tree/notebooks/{name}?reset&token={self.token}")
        wait_until_idle(page)
        choose(page, "Run", "Run All Cells")
        page.wait_for_function(ALL_RUN, timeout=1000 * RUN_S)


def wait_until_idle(page):
    """Until the kernel is there and idle. The toolbar's circle looks so before there is one."""
    page.locator("#jp-main-statusbar").get_by_text(READY).wait_for(timeout=1000 * START_S)


def choose(page, menu, entry):
    """An entry of JupyterLab's menu bar, clicked as a user does."""
    page.locator("#jp-MainMenu").get_by_text(menu, exact=True).click()
    page.locator(".lm-Menu-itemLabel").get_by_text(entry, exact=True).click()


def drop(page, place, *paths):
    """Files dropped on a place of the page, as from the desktop."""
    box = place.bounding_box()
    session = page.context.new_cdp_session(page)
    files = {
        "items": [],
        "files": [str(path) for path in paths],
        "dragOperationsMask": 1,
    }
    at = {
        "x": box["x"] + box["width"] / 2,
        "y": box["y"] + box["height"] / 2,
        "data": files,
    }
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **at})


def errors_on(page):
    """The last line of each error or warning that the notebook on the page shows."""
    errors = page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts()
    return [text.strip().splitlines()[-1] for text in errors]


@contextmanager
def running_lab(folder):
    """JupyterLab as `make lab` starts it, in replay mode, with none of the user's settings."""
    work = folder / "notebooks"
    work.mkdir()
    shutil.copy(NOTEBOOKS / "01_start.ipynb", work)
    (folder / "data").symlink_to(ROOT / "data")  # beside the notebooks, as in the project
    command = ["make", "--no-print-directory", "lab", "STAMP=", f"LAB_ROOT={folder}"]
    command += [f"BIN={Path(sys.executable).parent}"]
    flags = ["--allow-root"] if os.geteuid() == 0 else []
    # Two servers that look for a free port at once take the same one, and one of them gives up.
    command.append(f"LAB_FLAGS={' '.join([*flags, f'--ServerApp.port={_free_port()}'])}")
    how = {"cwd": ROOT, "env": _environment(folder), "start_new_session": True}
    with (folder / "lab.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **how)
        try:
            yield _wait_for(process, folder, work)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(START_S)


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _environment(folder):
    for name, chosen in SETTINGS.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(chosen))
    # `make lab` opens a browser; this one shows nothing.
    own = {"ATTNLIB_MODE": "replay", "BROWSER": "true"}
    places = "JUPYTER_CONFIG JUPYTER_RUNTIME JUPYTERLAB_SETTINGS JUPYTERLAB_WORKSPACES"
    for name in places.split():
        own[f"{name}_DIR"] = str(folder / name.split("_")[1].lower())
    own["PYTHONPATH"] = os.pathsep.join(
        [
            str(ROOT),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    return {name: v for name, v in os.environ.items() if name not in SWITCHES} | own


def _wait_for(process, folder, work):
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        for path in folder.glob("runtime/jpserver-*.json"):
            try:
                told = json.loads(path.read_text())
                urlopen(f"{told['url']}api?token={told['token']}").close()
            except (OSError, ValueError):
                continue  # written, but not whole yet, or not listening yet
            return Lab(told["url"], told["token"], told["pid"], work)
        time.sleep(STEP_S)
    raise AssertionError(f"make lab did not start: {(folder / 'lab.log').read_text()[-2000:]}")
