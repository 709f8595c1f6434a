"""The widgets as their users have them: in JupyterLab and in a saved page, driven by a browser.

Set CONTBATCH_SCREENSHOTS to a folder to keep what was seen.
"""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import nbformat
import pytest
from smollm2 import model_path
from test_film import played

import contbatch as cb
from contbatch.player import ARRAYS, script

playwright_api = pytest.importorskip("playwright.sync_api", reason="pip install 'contbatch[dev]'")
ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_MS = 240_000
PIXELS = "element => [...element.querySelectorAll('canvas')].map(canvas => canvas.toDataURL()).join()"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")


@pytest.fixture(scope="module")
def browser():
    with playwright_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address and token of a JupyterLab of its own, on copies of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    for name in ("00_quickstart", "08_widgets"):
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4)
        for cell in notebook.cells:  # nbval runs it with the whole answers
            cell.source = cell.source.replace("max_tokens=n, ignore_eos", "max_tokens=min(n, 8), ignore_eos")
        nbformat.write(notebook, folder / "notebooks" / f"{name}.ipynb")
    news = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    places = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    places |= {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }
    environment = os.environ | places | {"TQDM_DISABLE": "1", "IPYTHONDIR": str(folder / "ipython")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder / "notebooks",
        "IdentityProvider.token": token,
        "LabApp.extension_manager": "readonly",
        "LabApp.expose_app_in_browser": True,
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", *(["--allow-root"] if os.geteuid() == 0 else [])]
    command += [f"--{name}={value}" for name, value in settings.items()]
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/api?token={token}", server)
        yield f"http://127.0.0.1:{port}/lab/tree", token
    finally:
        server.send_signal(signal.SIGTERM)  # it ends its kernels
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_for(address, server):
    end = time.monotonic() + PATIENCE_MS / 1000
    while True:
        assert server.poll() is None, "JupyterLab did not start"
        try:
            with urlopen(address):
                return
        except URLError:
            assert time.monotonic() < end
            time.sleep(0.2)


def watched(browser, **look):
    """A new page, and the errors that it meets."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, **look)
    page.set_default_timeout(PATIENCE_MS)
    faults = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    return page, faults


def run_all(page, lab, name):
    """Open a notebook and run its cells to the last."""
    address, token = lab
    page.goto(f"{address}/{name}.ipynb?token={token}&reset")
    # Idle before there is a kernel, too: run then, and JupyterLab asks which kernel to have, and waits.
    page.get_by_role("button", name=re.compile(r"^Python 3 .*\| Idle$")).wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_selector(".cb-replay canvas", state="attached")
    page.wait_for_selector(".contbatch-explore img", state="attached")
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    return page.locator(".contbatch-explore"), page.locator(".cb-replay")


def keep(page, name):
    if folder := os.environ.get("CONTBATCH_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def says(explorer, code):
    """Wait until it has simulated what it was set to, and tells the code of it."""
    playwright_api.expect(explorer.locator("code")).to_contain_text(code, timeout=PATIENCE_MS)


def pixels(player):
    """What is on its canvases."""
    return player.evaluate(PIXELS)


def test_the_quickstart_in_jupyterlab(browser, lab):
    model_path()
    page, faults = watched(browser)
    explorer, player = run_all(page, lab, "00_quickstart")
    player.scroll_into_view_if_needed()
    before, clock = pixels(player), player.locator(".clock").inner_text()
    assert clock.startswith("step 1 of ")
    player.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_function("old => document.querySelector('.cb-replay .clock').textContent !== old", arg=clock)
    player.get_by_role("button", name="Pause", exact=True).click()
    assert pixels(player) != before
    player.get_by_label("Step", exact=True).press("End")
    last = player.locator(".clock").inner_text().split(",")[0]
    assert last.removeprefix("step ").split(" of ")[0] == last.split(" of ")[1]
    player.get_by_label("Step", exact=True).evaluate("e => { e.value = 12; e.dispatchEvent(new Event('input')); }")
    assert len(player.locator(".answer").inner_text()) > 10  # text, not token ids
    assert not player.locator(".answer").inner_text().replace(" ", "").isdigit()
    keep(page, "quickstart_replay")
    explorer.scroll_into_view_if_needed()
    picture = explorer.locator("img").get_attribute("src")
    handle = explorer.get_by_role("slider", name="rate", exact=True)
    handle.press("End")
    page.wait_for_function("old => document.querySelector('.contbatch-explore img').src !== old", arg=picture)
    says(explorer, "rate=16.0")
    keep(page, "quickstart_explore")
    assert faults == []
    page.close()


def test_widgets_by_keyboard_and_in_the_dark(browser, lab):
    page, faults = watched(browser)
    explorer, player = run_all(page, lab, "08_widgets")
    # Every control has a name, and is reached by the tabulator key.
    for name in ("num_pages", "policy", "victim"):
        assert explorer.get_by_label(name, exact=True).evaluate("e => e.tagName") == "SELECT"
    assert explorer.get_by_role("slider").evaluate_all("es => es.map(e => e.getAttribute('aria-label'))") == ["rate"]
    assert [
        name for name in ("Pin this run", "Unpin all") if explorer.get_by_role("button", name=name).count() != 1
    ] == []
    nameless = "es => es.filter(e => !e.getAttribute('aria-label')).map(e => e.outerHTML)"
    assert player.locator("button, input, select").evaluate_all(nameless) == []
    explorer.get_by_label("policy", exact=True).select_option(label="StaticBatching()")
    size = explorer.get_by_label("batch_size", exact=True)
    size.fill("0")
    size.press("Enter")
    said = "text => document.querySelector('.contbatch-explore [role=status]').textContent === text"
    page.wait_for_function(said, arg="batch_size must be an integer ≥ 1, got 0")
    size.fill("12")
    size.press("Enter")
    says(explorer, "policy=cb.StaticBatching(batch_size=12)")
    assert explorer.get_by_role("status").inner_text() == ""
    keep(page, "explore")
    # The kernel moved the player to the longest queue; the keys move it on.
    player.scroll_into_view_if_needed()
    page.wait_for_function("() => Number(document.querySelector('.cb-replay .clock').textContent.split(' ')[1]) > 1")
    number = int(player.locator(".clock").inner_text().split()[1])
    player.focus()
    for keys, moved in (("ArrowRight", 1), ("Shift+ArrowRight", 11), ("ArrowLeft", 10), ("Shift+ArrowLeft", 0)):
        player.press(keys)
        assert int(player.locator(".clock").inner_text().split()[1]) == number + moved
    assert "waiting" in player.get_by_role("status").inner_text()
    light = pixels(player)
    player.press("ArrowDown")
    assert pixels(player) != light  # chosen
    player.press("Escape")
    assert pixels(player) == light
    player.press(" ")
    assert player.get_by_role("button", name="Pause", exact=True).count() == 1
    player.press(" ")
    assert player.get_by_role("button", name="Play", exact=True).count() == 1
    keep(page, "replay")
    page.evaluate("window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })")
    page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
    page.wait_for_function(f"old => ({PIXELS})(document.querySelector('.cb-replay')) !== old", arg=light)
    keep(page, "replay_dark")
    assert faults == []
    page.close()


@pytest.fixture(scope="module")
def crowded():
    """A run with 256 seats, a thousand steps, swaps and shared pages."""
    workload = cb.Poisson(
        rate=200, num_requests=1000, seed=1, prefix=cb.SharedPrefix(64, 3), output=cb.lengths.Uniform(30, 200)
    )
    experiment = cb.Experiment(policy=cb.ContinuousBatching(), workload=workload, max_num_seqs=256, num_pages=2500)
    return cb.replay(cb.run(experiment.replace(num_host_pages=500, prefix_cache=True)))


def test_the_script_shows_the_states_of_the_film_wherever_one_jumps(browser, crowded):
    page, faults = watched(browser)
    page.goto("about:blank")
    states, film = list(played(crowded.film)), crowded.film
    arrays = {name: b64encode(getattr(film, name).tobytes()).decode() for name in ARRAYS}
    page.evaluate(
        """async ([script, about, arrays]) => {
            const module = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
            const bytes = ([name, text]) => [name, Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer];
            window.film = new module.Film(about, Object.fromEntries(Object.entries(arrays).map(bytes)));
        }""",
        [script(), crowded._about(), arrays],
    )
    steps = [0, 1, 2, 300, 299, 640, 639, 641, len(film) - 1, 64, 63, 65, 0, 500]
    for step in steps:
        seats, work, pages, queue, tokens, gone = states[step]
        shown = page.evaluate(
            """(step) => {
                film.go(step);
                const counts = film.requests.map((_, request) => film.count(request));
                return [[...film.seats], [...film.work], [...film.pages], film.queue, film.numGone, counts];
            }""",
            step,
        )
        size = crowded.film.settings
        assert shown[0] == [seats.get(seat, -1) for seat in range(size["max_num_seqs"])]
        assert shown[1] == [work.get(seat, 0) for seat in range(size["max_num_seqs"])]
        assert shown[2] == [pages.get(p, -1) for p in range(size["num_pages"])]
        assert shown[3] == [4 * request + kind for request, kind in queue]
        assert shown[4] == len(gone)
        assert shown[5] == [len(tokens.get(request, ())) for request in range(len(film.requests))]
    assert faults == []
    page.close()


def test_a_saved_page_plays_by_itself(browser, crowded, tmp_path):
    page, faults = watched(browser, color_scheme="dark", offline=True)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    path = crowded.save(tmp_path / "run.html")
    page.goto(path.as_uri())
    player = page.locator(".cb-replay")
    assert len(crowded.film) >= 1000
    player.locator(".clock").wait_for()
    player.get_by_label("Speed").select_option("60")
    before = pixels(player)
    player.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_function("() => document.querySelector('.clock').textContent.split(' ')[1] > 20")
    player.get_by_role("button", name="Pause", exact=True).click()
    assert pixels(player) != before
    player.get_by_label("Step", exact=True).evaluate("e => { e.value = 400; e.dispatchEvent(new Event('input')); }")
    assert "of 256 seats taken" in player.get_by_role("status").inner_text()
    keep(page, "page_dark")
    assert requests == [path.as_uri()]
    assert faults == []
    page.close()


def test_ids_are_text_in_a_page_and_not_code(browser, tmp_path):
    page, faults = watched(browser)
    log, evil = cb.DecisionLog(), "</script><img src=x onerror='document.title=1'>"
    engine = cb.Engine(
        cb.Scheduler(cb.ContinuousBatching(), num_pages=8, max_num_seqs=1), cb.Simulated().runner(), log=log
    )
    engine.run(
        [
            cb.Request(evil, [1, 2], cb.SamplingParams(max_tokens=2)),
            cb.Request(evil + "2", [1], cb.SamplingParams(max_tokens=2)),
        ]
    )
    page.goto(cb.replay(log).save(tmp_path / "evil.html").as_uri())
    page.locator(".cb-replay .clock").wait_for()
    assert page.locator(".cb-replay h4").last.inner_text() == f"Answer of {evil}: 1 tokens"
    assert page.locator(".cb-replay li").inner_text() == evil + "2"
    assert page.locator("img").count() == 0
    assert faults == []
    page.close()
