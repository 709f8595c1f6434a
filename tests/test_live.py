"""The live picture: what it says, how often it comes, when it stays away; in a kernel, with an interrupt."""

import os
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from fake_runner import engine_of, request
from tiny_llm import write_tiny

import contbatch as cb
from contbatch import live as live_module
from contbatch.live import PERIOD_S, SHARE, Live, watching
from contbatch.live_picture import POINTS, Picture

PICTURE = Picture("<P>", "running", 1.0, (("prompt", "<a>"), ("empty", "")), 3, 4, 5, (0.0, 9.0), (2, 1, 8))


class Shown:
    """Stands for IPython's display: keeps what was shown, each time after `cost` seconds of a clock of its own."""

    def __init__(self, monkeypatch, cost=0.0, tick=0.01):
        self.pictures, self.times, self.now, self.cost, self.tick = [], [], 0.0, cost, tick
        self.displays = 0
        monkeypatch.setattr("IPython.display.display", self.display)
        monkeypatch.setattr(live_module, "perf_counter", self.clock)
        monkeypatch.delenv("TQDM_DISABLE", raising=False)

    def clock(self):
        return self.now

    def display(self, picture, display_id):
        assert display_id is True
        self.displays += 1
        self.update(picture)
        return self

    def update(self, picture):
        self.times.append(self.now)
        self.pictures.append(picture)
        self.now += self.cost

    def on_step(self, watch):
        def told(engine, left):
            self.now += self.tick
            watch(engine, left)

        return told


def requests():
    return [request(i, 5, 20 + 5 * i) for i in range(6)]


def run(shown, policy=None, **limits):
    engine = engine_of(policy or cb.ContinuousBatching(), max_num_seqs=2, **limits)
    with watching(True, "mine") as watch:
        result = engine.run(requests(), watch=shown.on_step(watch))
    return result, watch


@pytest.mark.parametrize("cost", [0.0, 0.001, 0.02])
def test_at_most_four_pictures_a_second_and_little_of_the_time(cost, monkeypatch):
    shown = Shown(monkeypatch, cost, tick=0.05)
    _, watch = run(shown)
    gaps = [b - a for a, b in pairwise(shown.times[:-1])]  # the last is shown at the end
    assert shown.displays == 1
    assert len(shown.pictures) == watch.num_pictures >= 3
    assert min(gaps) >= max(PERIOD_S, cost / SHARE) - 1e-9
    between = watch.spent_s - cost  # what the first picture took, before there was any time to take it from
    assert between <= 0.011 * shown.now


def test_pictures_say_what_the_tables_say(monkeypatch):
    shown = Shown(monkeypatch, tick=0.3)
    result, _ = run(shown, cb.StaticBatching(2))
    *running, last = shown.pictures
    assert len(running) == len(result.steps)
    for picture, step in zip(running, result.steps.itertuples(), strict=True):
        assert picture.state == "running"
        assert sum(kind != "empty" for kind, _ in picture.seats) <= step.seats
        assert picture.pages[2] == result.num_pages
        assert picture.waiting <= step.waiting
    made = result.steps.sampled_tokens.cumsum()
    assert [picture.tokens for picture in running] == list(made)
    assert {kind for picture in running for kind, _ in picture.seats} == {"answer", "held", "empty"}
    assert (last.state, last.answered, last.tokens) == ("done", 6, int(result.requests.output_tokens.sum()))
    assert last.pages[0] == 0
    rate = running[-1].rates[-1]
    assert rate == pytest.approx(1 / 0.3, rel=0.8)
    assert len(last.rates) <= POINTS


def test_a_prompt_in_pieces_is_seen(monkeypatch):
    shown = Shown(monkeypatch, tick=0.3)
    run(shown, cb.ChunkedPrefill(), max_num_batched_tokens=3)
    assert ("prompt", "0") in shown.pictures[0].seats


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")])
def test_the_last_picture_stays_after_an_interrupt(error, state, monkeypatch):
    shown = Shown(monkeypatch, tick=0.1)
    engine = engine_of(cb.ContinuousBatching(), max_num_seqs=2)

    def told(engine, left):
        shown.on_step(watch)(engine, left)
        if shown.now > 1:
            raise error

    with pytest.raises(error), watching(True, "mine") as watch:
        engine.run(requests(), watch=told)
    before, last = shown.pictures[-2:]
    assert last.state == state
    assert last.seats == before.seats != (("empty", ""),) * 2
    assert engine.run([request("next", 3, 2)]).requests.finish_reason.tolist() == ["length"]


def test_nothing_is_shown_unless_asked_and_nothing_where_bars_are_off(monkeypatch, capsys):
    shown = Shown(monkeypatch)
    with watching(None, "a script") as watch:
        assert watch is None
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with watching(True, "asked, but off") as watch:
        assert watch is None
    monkeypatch.setenv("TQDM_DISABLE", "0")
    with watching(True, "asked") as watch:
        assert isinstance(watch, Live)
    assert shown.pictures == []  # nothing has happened
    assert capsys.readouterr() == ("", "")


def test_a_script_that_asks_gets_lines(capsys, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    with watching(True, "mine") as watch:
        engine_of(max_num_seqs=2).run(requests(), watch=watch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine: running, ")
    assert "seats 2/2, 4 wait" in lines[0]
    assert lines[-1].startswith("mine: done, ")


def test_html_escapes_names_and_has_no_colour_of_text_of_its_own():
    html = PICTURE._repr_html_()
    assert "&lt;P&gt;" in html
    assert "&lt;a&gt;" in html
    assert "<a>" not in html
    assert "2 of 8 pages, 1 cached" in html
    assert html.count("<div") == html.count("</div>") == 1
    assert repr(PICTURE) == "<P>: running, 1.0 s, seats 1/2, 3 wait, 4 answered, 5 tokens, 9 tokens/s, pages 2/8"


# ---- in a kernel -------------------------------------------------------------------------------------------------

SETUP = """
import contbatch as cb
llm = cb.LLM({folder!r}, num_pages=400, page_size=16, max_num_seqs=4)
long = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=400, prompt=9, output=90)
exp = cb.Experiment(workload=long, policy=cb.ContinuousBatching(), max_num_seqs=4)
short = long.replace(output=5, num_requests=8)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    manager_class = pytest.importorskip("jupyter_client").KernelManager
    manager = manager_class(kernel_name="python3")
    folder = tmp_path_factory.mktemp("live")
    env = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}  # which hides the picture
    env["CONTBATCH_CACHE"] = str(folder)  # where no older export makes a new one worth a message
    manager.start_kernel(extra_arguments=["--IPKernelApp.log_level=50"], env=env)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        write_tiny(folder)
        outcome = execute(client, SETUP.format(folder=str(folder)))
        assert outcome == []
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def execute(client, code, *, asks=False, act=None):
    """Run code and return the messages that it sent; `act` is called when the second arrives."""
    sent = client.execute(code, allow_stdin=asks)
    messages = []
    while True:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            return messages
        if kind not in ("status", "execute_input"):
            messages.append((kind, content))
            if act and len(messages) == 2:
                act()


def test_in_a_notebook_with_a_person_and_only_there(kernel):
    _, client = kernel
    code = "result = cb.run(exp.replace(workload=short, backend=llm){})"
    assert execute(client, code.format("")) == []
    messages = execute(client, code.format(""), asks=True)
    assert [kind for kind, _ in messages][:1] == ["display_data"]
    assert {kind for kind, _ in messages[1:]} == {"update_display_data"}
    assert {content["transient"]["display_id"] for _, content in messages} == {
        messages[0][1]["transient"]["display_id"]
    }
    assert "done" in messages[-1][1]["data"]["text/html"]
    assert "8 answered" in messages[-1][1]["data"]["text/plain"]
    assert execute(client, code.format(", live=False"), asks=True) == []
    assert execute(client, code.format(", live=True"))[0][0] == "display_data"


def test_an_interrupt_leaves_the_picture_and_a_kernel_that_works(kernel):
    manager, client = kernel
    began = time.monotonic()
    messages = execute(client, "cb.run(exp.replace(backend=llm), live=True)", act=manager.interrupt_kernel)
    kinds = [kind for kind, _ in messages]
    assert kinds[-2:] == ["update_display_data", "error"]
    assert messages[-1][1]["ename"] == "KeyboardInterrupt"
    assert "interrupted" in messages[-2][1]["data"]["text/html"]
    after = execute(client, "print(llm.num_free_pages, len(cb.run(exp.replace(workload=short, backend=llm)).finished))")
    assert [content["text"] for _, content in after] == ["400 8\n"]
    assert time.monotonic() - began < 100


def test_nbval_sees_nothing(tmp_path):
    """A notebook that runs an experiment has the outputs that it prints, and no others."""
    nbformat = pytest.importorskip("nbformat")
    (tmp_path / "model").mkdir()
    folder = write_tiny(tmp_path / "model")
    code = SETUP.format(folder=str(folder)) + "result = cb.run(exp.replace(workload=short, backend=llm)); print('ran')"
    cell = nbformat.v4.new_code_cell(code, execution_count=1, outputs=[nbformat.v4.new_output("stream", text="ran\n")])
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), tmp_path / "n.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", str(tmp_path / "n.ipynb")]
    found = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, found))}  # a relative one is of this folder
    done = subprocess.run(command, capture_output=True, check=False, text=True, cwd=tmp_path, env=env)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
