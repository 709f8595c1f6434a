"""Replay: of what it takes a film, and the page it writes."""

import gzip
import json
import re
from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest

import contbatch as cb
from contbatch import cli, player
from contbatch.errors import DecisionLogError
from contbatch.film import Film


def experiment():
    return cb.Experiment(workload=cb.Poisson(rate=8, num_requests=20, seed=1), num_pages=100, max_num_seqs=8)


def page_data(path):
    """What a saved page holds: its title, its data and the arrays."""
    text = path.read_text(encoding="utf-8")
    [told] = re.findall(r'<script type="application/json" id="film">(.*?)</script>', text, re.DOTALL)
    film = json.loads(told)
    whole, arrays = gzip.decompress(b64decode(film["data"])), {}
    for name, size in film["sizes"]:
        arrays[name], whole = whole[:size], whole[size:]
    return text, film["about"], arrays


def test_a_result_of_run_is_simulated_again_if_it_kept_no_log():
    log = cb.DecisionLog()
    logged, plain = cb.run(experiment(), log=log), cb.run(experiment())
    assert logged.decisions is log
    assert plain.decisions is None
    films = [cb.replay(source).film for source in (logged, plain, log)]
    assert films[0].settings == films[1].settings == films[2].settings
    assert all(np.array_equal(film.changes, films[0].changes) for film in films)
    assert len(films[0]) == len(plain.steps)


def test_results_that_can_not_be_replayed_say_what_to_do():
    lost = replace(cb.run(experiment()), experiment=None)
    with pytest.raises(DecisionLogError, match=r"log=cb\.DecisionLog\(\)"):
        cb.replay(lost)
    with pytest.raises(DecisionLogError, match=r"log=cb\.DecisionLog\(\)"):
        cb.replay(cb.simulate(experiment().workload))
    with pytest.raises(DecisionLogError, match="a Result, a DecisionLog or a path"):
        cb.replay(experiment())


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_command_makes_a_page_of_a_log(suffix, tmp_path, capsys):
    result = cb.run(experiment(), log=cb.DecisionLog())
    path = result.decisions.save(tmp_path / f"run{suffix}")
    assert cli.main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run.html")
    assert cli.main(["replay", str(path), "-o", str(tmp_path / "other.html")]) == 0
    text, about, arrays = page_data(tmp_path / "other.html")
    assert text == (tmp_path / "run.html").read_text(encoding="utf-8")
    assert about["settings"]["num_pages"] == 100
    film = Film.of(result.decisions)
    assert {name: getattr(film, name).tobytes() for name in ("now", "bound", "starts", "changes")} == arrays
    assert re.findall(r"(?:src|href)=|https?:|import ", text) == []  # nothing from anywhere else


def test_the_command_refuses_logs_that_can_not_be(tmp_path, capsys):
    assert cli.main(["replay", str(tmp_path / "run.txt")]) == 1
    assert "is a file *.jsonl or *.parquet" in capsys.readouterr().err
    log = cb.run(experiment(), log=cb.DecisionLog()).decisions
    log.rows[3].free += 1
    path = log.save(tmp_path / "run.jsonl")
    assert cli.main(["replay", str(path)]) == 1
    assert "step 3 (row 3)" in capsys.readouterr().err
    assert not (tmp_path / "run.html").exists()
    assert cli.main(["replay", str(tmp_path / "absent.jsonl")]) == 1
    assert "absent.jsonl" in capsys.readouterr().err


def test_what_a_log_says_can_not_leave_its_place_in_the_page(tmp_path):
    evil = "</script><script>alert(1)</script><!--"
    log = cb.DecisionLog()
    engine = cb.Engine(cb.Scheduler(cb.ContinuousBatching(), num_pages=8), cb.Simulated().runner(), log=log)
    engine.run([cb.Request(evil, [1, 2], cb.SamplingParams(max_tokens=2))])
    log.settings["policy"] = evil
    path = cb.replay(log).save(tmp_path / "evil.html")
    text, about, _ = page_data(path)
    assert about["requests"] == [evil]
    assert text.count("alert(1)") == 4  # title, heading, the policy and the request in the data
    assert "<script>alert" not in text
    assert "<!--" not in text


def test_texts_of_tokens(tmp_path):
    class Letters:
        def token_text(self, token):
            return "abcdefgh"[token]

    log = cb.DecisionLog()
    engine = cb.Engine(cb.Scheduler(cb.ContinuousBatching(), num_pages=8), cb.Simulated().runner(), log=log)
    engine.run([cb.Request(0, [1, 2], cb.SamplingParams(max_tokens=3))])
    assert cb.replay(log)._texts == {0: "▪"}  # the simulator makes no text
    assert cb.replay(log, tokenizer=Letters())._texts == {0: "a"}
    log.rows[-1].sampled[0][1] = 5
    assert cb.replay(log)._texts == {0: "0 ", 5: "5 "}


def test_the_output_has_a_picture_for_front_ends_without_widgets(monkeypatch):
    shown = cb.replay(cb.run(experiment()))
    bundle = shown._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert re.fullmatch(r"<Player: \d+ steps of 20 requests under ChunkedPrefill\(\)>", bundle["text/plain"])
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == shown.view.model_id
    monkeypatch.setitem(__import__("sys").modules, "contbatch.player_view", None)
    bundle = cb.replay(cb.run(experiment()))._repr_mimebundle_()
    assert bundle.keys() == {"text/plain", "image/png"}


def test_the_step_can_be_read_and_set():
    shown = cb.replay(cb.run(experiment()))
    assert shown.step == 0
    shown.step = 5
    assert shown.view.step == shown.step == 5
    for bad in (-1, len(shown.film), 1.5, True):
        with pytest.raises(DecisionLogError, match=r"step must be in \[0, "):
            shown.step = bad
    assert shown.view.get_state()["changes"] == shown.film.changes.tobytes()


def test_the_script_is_part_of_the_package():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["package-data"]["contbatch"] == list(player.SCRIPTS)
