"""JupyterLab as `make lab` starts it: for this machine only, and a walk through what it promises.

nbval runs every notebook besides.
"""

import time
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

import nbformat
import psutil
import pytest
from driving import NOTEBOOKS, ROOT, drop, errors_on, hold_picture, wait_until_idle
from PIL import Image

pytestmark = pytest.mark.browser
OWN = """def step(side):
    return sum(row * row for row in range(side))
attnlib.profile(step, 1000)"""
SAVE = 'view.figure().savefig("mine.png")'
EXPLORE = 'attnlib.explore("Llama-3.1-8B", release="0.6.3", batch=16, kv_len=8192)'
PLAY = 'attnlib.play_schedule("8/1", "65536+1024x31")'
MOST_PLAY_S = 0.3
MOST_S = 1.0
"""Of a step of the explorer, the quickest of its tries: a busy machine delays some."""
CUT = """explorer => {
    const isCut = each => each.clientWidth && each.scrollWidth > each.clientWidth + 1;
    const isWider = select => {
        const own = select.cloneNode();
        own.style.width = 'auto';
        own.append(...[...select.selectedOptions].map(chosen => new Option(chosen.text)));
        select.after(own);
        const answer = own.offsetWidth > select.offsetWidth;
        own.remove();
        return answer;
    };
    const seen = ':not(select):not(.scroll):not(.noUi-origin)';
    const all = [...explorer.querySelectorAll(seen)].filter(isCut);
    return [...all, ...[...explorer.querySelectorAll('select')].filter(isWider)]
        .map(each => `${each.tagName} ${each.className}: ${each.innerText.slice(0, 80)}`);
}"""
"""What an explorer shows in part: text or picture wider than its box, or a choice than its list. A
`.scroll` box is scrolled by its reader."""


def test_the_server_and_all_it_started_listen_on_this_machine_only(lab):
    assert urlsplit(lab.url).hostname in ("127.0.0.1", "localhost")
    server, found = psutil.Process(lab.pid), []
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            found += process.net_connections()
    addresses = {each.laddr.ip for each in found if each.status == "LISTEN"}
    assert addresses and addresses <= {"127.0.0.1", "::1"}


def seconds_until(explorer, title, act, *arguments):
    """Seconds from an act of the user's until the explorer has a card of another title."""
    card, started = explorer.locator("h4").filter(has_text=title), time.monotonic()
    assert card.count() == 0
    act(*arguments)
    card.wait_for()
    took = time.monotonic() - started
    wait_until_idle(explorer.page)  # else what the kernel still sends undoes the next act
    return took


def test_the_start_notebook_ones_own_function_a_control_advice_and_a_saved_figure(lab, page, asked):
    logged = []
    page.on("console", lambda each: logged.append((each.type, each.text)))
    start = nbformat.read(NOTEBOOKS / "01_start.ipynb", as_version=4).cells
    lab.run(page, *start, SAVE, OWN, EXPLORE, "1 / 0")
    assert errors_on(page) == ["ZeroDivisionError: division by zero"], "it would be noticed"
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
    assert prompts == [f"[{number}]:" for number in range(1, len(prompts) + 1)]
    assert (lab.folder / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert "step" in page.locator(".attnlib-card h4").get_by_text("step: ").inner_text()

    explorer = page.locator(".attn-explorer").last
    explorer.get_by_role("table").first.wait_for()
    assert explorer.evaluate(CUT) == []
    explorer.evaluate("explorer => explorer.scrollIntoView()")
    figure, box = explorer.locator(".attn-explorer-figure img"), explorer.bounding_box()
    box["height"] = figure.bounding_box()["y"] + figure.bounding_box()["height"] - box["y"]
    hold_picture("explorer.png", page.screenshot(clip=box), figure.get_attribute("alt"))
    lengths = explorer.get_by_role("slider").last
    press = explorer.get_by_role("button", name="Advice for this layer").click
    takes, changed, advised = partial(seconds_until, explorer), [], []
    for kv_len in (16384, 65536, 131072):
        changed.append(takes(f"lens={kv_len}x16", lengths.press, "ArrowRight"))
        advised.append(takes(f"lens={kv_len}x16: ", press))
    model = explorer.get_by_label("Model").select_option
    takes("70B at TP 8", model, "Llama-3.1-70B\xa0at\xa0TP\xa08")  # of fewer backends
    assert [text for kind, text in logged if kind == "error"] == []
    assert explorer.evaluate(CUT) == []
    assert max(min(changed), min(advised)) < MOST_S
    hosts = {urlsplit(url).hostname for url in asked if url.startswith("http")}
    assert hosts == {urlsplit(lab.url).hostname}


def test_the_notebook_of_traces_runs_from_top_to_bottom_and_then_reads_a_dropped_one(lab, page):
    cells = nbformat.read(NOTEBOOKS / "02_something_got_slower.ipynb", as_version=4).cells
    lab.run(page, "import attnlib")
    files = page.locator(".jp-DirListing-content")
    drop(page, files, ROOT / "data" / "traces" / "verify_128.json.gz")
    files.get_by_text("verify_128.json.gz", exact=True).wait_for()
    lab.run(page, *cells, 'attnlib.diagnose("verify_128.json.gz")')
    assert errors_on(page) == []
    assert page.get_by_text("first slower release 0.6.0").count()
    assert page.locator(".attnlib-card h4").last.inner_text().startswith("verify_128.json.gz: ")


def test_a_drag_of_a_slider_draws_the_schedule_at_once_and_nothing_is_cut(lab, page):
    lab.run(page, "import attnlib", PLAY)
    player = page.locator(".attn-schedule").last
    picture = player.get_by_role("img")
    picture.wait_for()
    player.evaluate("player => player.scrollIntoView()")
    long = player.get_by_role("slider").first
    took = [
        seconds_until(player, f"lens={tokens}+", long.press, "ArrowRight")
        for tokens in (98304, 131072, 196608)
    ]
    assert min(took) < MOST_PLAY_S
    assert "SGLang 0.5.23, bounded: longest" in picture.get_attribute("aria-label")
    player.get_by_label("Lengths from").select_option("a\xa0step\xa0of\xa0traffic")
    player.locator("h4").filter(has_text="16 requests of").wait_for()
    player.get_by_label("Kernel").select_option("FlashInfer's\xa0fa2")
    player.locator("h4").filter(has_text="FlashInfer's fa2").wait_for()
    assert player.evaluate(CUT) == [] and errors_on(page) == []


def test_two_traces_are_dropped_and_compared_a_wrong_file_is_refused_and_figures_are_saved(
    lab, page
):
    lab.run(page, "import attnlib")
    traces, wrong = ROOT / "data" / "traces", lab.folder.parent / "wrong.json"
    wrong.write_text("{}")
    files = page.locator(".jp-DirListing-content")
    drop(page, files, traces / "fa3_decode.json.gz", traces / "fa2_host.json.gz", wrong)
    for name in ("fa3_decode.json.gz", "fa2_host.json.gz", "wrong.json"):
        files.get_by_text(name, exact=True).wait_for()
    change = 'change = attnlib.diagnose("fa3_decode.json.gz", "fa2_host.json.gz")'
    refused = 'attnlib.diagnose("wrong.json")'
    slow = "import attnlib, time\nattnlib.profile(lambda: time.sleep(0.1))"
    lab.run(page, slow, f"{change}\nchange", 'change.figure().savefig("c.png")', refused)
    whole = "all => all.every(each => each.scrollWidth <= each.clientWidth + 1)"
    assert page.locator(".attnlib-card .scroll").evaluate_all(whole)
    assert page.get_by_text("known patterns of each trace").count() == 1
    assert page.locator(".progress").count() == 0, "a bar is gone once all is done"
    assert errors_on(page)[0].startswith("ValueError: wrong.json must be a Chrome trace")
    with Image.open(lab.folder / "c.png") as saved:
        assert len(saved.getcolors(1 << 20)) > 50, "a blank one has one"
