"""The report: recorded numbers, rollouts as they were sampled, and a page that works in a real browser."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browsing import asked, focus, opened, press, text, wait
from programs import completed

from psearch_jax.eval.evaluate import Evaluation, trajectory_row
from psearch_jax.eval.scores import em_interval, figures, finished_by_turn, score
from psearch_jax.eval.tables import results
from psearch_jax.report import page, rollouts
from psearch_jax.report.rollouts import Spelling, passage_lines, spread_out
from psearch_jax.report.runs import read_metrics, read_runs, score_of
from psearch_jax.runtime.metrics import MetricsWriter
from psearch_jax.text import tags
from psearch_jax.types import Question, RewardParts, Trajectory, Turn, UserError
from retrieval.protocol import Passage

HOSTILE = "</script><script>window.forged = 1</script><img src=x onerror='window.forged = 1'> born in Brünn"
PASSAGES = (Passage("p0", "Ada Lovelace", HOSTILE), Passage("p1", "", "Alan Turing was born in 1912."))
KINDS = ("parallel", "sequential", "single")


def test_a_supervised_run_is_refused(tmp_path):
    """A traceback, or a page without a single chart."""
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(1, {"loss": 1.0, "progress": 0.5})
    with pytest.raises(UserError, match="a run of launch/sft.py found"):
        read_runs([tmp_path])


def rollout(tokenizer, number: int, sample: int, right: bool, split: bool, obs_tokens: int = 400) -> Trajectory:
    """A rollout of one search and one answer, rendered by the project's own functions."""
    question = Question("test", f"q{number}", f"Who is older, <b>{number}</b>?", ("Ada",), KINDS[number % 3])
    queries = ("Ada Lovelace born", "Alan Turing born in Brünn")[: 2 if split else 1]
    search = f"<think> who </think> <search> {' ## '.join(queries)} </search>"
    answer = f"<think> é so </think> <answer> {'Ada' if right else 'Alan'} </answer>"
    passages = tuple(PASSAGES for _ in queries)
    parts = [
        (tokenizer.encode_foreign(f"Question: {question.text}\n"), False),
        (tokenizer.encode_foreign(search), True),
        (tags.render_observation(queries, passages, tokenizer.encode_foreign, obs_tokens), False),
        ([*tokenizer.encode_foreign(answer), min(tokenizer.stop_ids)], True),
    ]
    ids = np.array([i for part, _ in parts for i in part], np.int32)
    mask = np.concatenate([np.full(len(part), sampled) for part, sampled in parts])
    logprobs = np.where(mask, -0.01 * (1 + np.arange(len(ids)) % 90), 0).astype(np.float32)
    turns = (
        Turn(search, "search", True, queries, passages, None, len(parts[1][0])),
        Turn(answer, "answer", True, (), (), "Ada" if right else "Alan", len(parts[3][0])),
    )
    return Trajectory(question, sample, "answered", turns, ids, mask, logprobs, len(parts[0][0]))


def write_run(directory: Path, tokenizer, steps: int = 12, questions: int = 3, alarm: int | None = None) -> Path:
    """A run directory whose questions repeat every four steps. Metrics go through the writer of training runs."""
    directory.mkdir()
    config = {"seed": 0, "method": "parallelsearch", "model": {"path": "", "tokenizer": tokenizer.name}}
    (directory / "config.json").write_text(json.dumps(config | {"train": {"steps": steps}}))
    (directory / "trajectories").mkdir()
    moments = {
        name: {"parallel": {"em": em, "questions": 10, "turns": 2.0}} for name, em in (("before", 0.5), ("after", 0.9))
    }
    (directory / "before.json").write_text(json.dumps({"": moments["before"]}))
    (directory / "summary.json").write_text(json.dumps({"steps": steps, "wall_s": {"total": 36.0}} | moments))
    rng, writer = np.random.default_rng(0), MetricsWriter(directory)
    names = ["reward", "kl", "entropy", "logp_gap", "gradient_norm", "groups_without_signal", "cost/row_use"]
    names += [f"{phase}_s" for phase in ("rollout", "reward", "logprobs", "update")] + ["status/eos", "valid_format"]
    names += [f"{name}/{kind}" for name in ("em", "decomposition", "searches", "turns") for kind in KINDS]
    names += [f"reward/{kind}/{d}/outcome" for kind in KINDS for d in ("split", "not_split")]
    for step in range(steps):
        values = {name: float(rng.random()) for name in names}
        values["reward/single/split/outcome"] = float("nan")
        if step == 7:
            values |= {"eval/parallel/em": 0.7, "eval/parallel/questions": 10.0}
        if alarm is not None:
            values["alarm/kl_high"] = float(step == alarm)
        writer.write(step, values)
        rows = []
        for q in range(questions):
            for sample in range(2):
                split = bool(rng.random() < 0.5)
                trajectory = rollout(tokenizer, step % 4 * questions + q, sample, bool(rng.random() < 0.7), split)
                rows.append(trajectory_row(trajectory, RewardParts(1.0, 0.0, 0.15, 0.35), step))
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / "trajectories" / f"{step:06d}.jsonl").write_text(text)
    writer.close()
    return directory


def write_evaluation(directory: Path, tokenizer, right: float) -> Path:
    """An evaluation of two benchmarks, written by the class that launch/eval.py uses."""
    rng = np.random.default_rng(1)
    rollouts = {
        name: [rollout(tokenizer, 10 * k + i, 0, bool(rng.random() < right), True) for i in range(9)]
        for k, name in enumerate(("nq", "popqa"))
    }
    evaluation = Evaluation(directory, {n: [t.question for t in ts] for n, ts in rollouts.items()}, {"method": "us"})
    by_question = {t.question.id: t for ts in rollouts.values() for t in ts}
    scores = evaluation.run(lambda asked, _: [by_question[q.id] for q in asked], 5, lambda *_: None)
    benchmarks = {name: figures(own) for name, own in scores.items()}
    evaluation.finish({"model": "toy", "benchmarks": benchmarks}, results(benchmarks, "us") + "\n")
    return directory


def write(directories: list[Path], file: Path | None = None) -> Path:
    return page.write_report(read_runs(directories), file)


def unpacked(html: str, name: str):
    letters = re.search(rf'id="{name}">([^<]*)</script>', html).group(1)
    return json.loads(gzip.decompress(base64.b64decode(letters)))


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_tokenizer) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "one", tiny_tokenizer)


@pytest.fixture(scope="module")
def html(run) -> str:
    return write([run]).read_text(encoding="utf-8")


# ---- numbers ----


def test_lines_are_the_numbers_of_metrics_jsonl(run, html):
    """A chart of another metric, run or step than its title says, or a NaN drawn as a number."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    data = unpacked(html, "data")
    charts = {chart["id"]: chart["lines"] for chart in data["charts"]}
    assert data["runs"] == [{"name": "one", "steps": list(range(12))}]
    expected_keys = {("reward", "", ""): "reward", ("kl", "", ""): "kl", ("entropy", "", ""): "entropy"}
    expected_keys |= {
        ("logp_gap", "", ""): "logp_gap",
        ("row_use", "", "decoded rows that sample a token"): "cost/row_use",
    }
    expected_keys |= {("seconds", "", phase): f"{phase}_s" for phase in ("rollout", "reward", "logprobs", "update")}
    for kind in KINDS:
        expected_keys |= {(name, kind, ""): f"{name}/{kind}" for name in ("em", "searches", "turns")}
        parts = {"split": "split", "not split": "not_split"}
        expected_keys |= {("reward_outcome", kind, name): f"reward/{kind}/{d}/outcome" for name, d in parts.items()}
    del expected_keys["reward_outcome", "single", "split"]
    for (chart, group, name), key in expected_keys.items():
        (line,) = [
            x for x in charts[chart] if (x.get("group", ""), x.get("name", "")) == (group, name) and "x" not in x
        ]
        assert line["y"] == pytest.approx([row[key] for row in rows], rel=1e-5), key
    groups = {(line["group"], line["name"]) for line in charts["reward_outcome"]}
    assert ("single", "split") not in groups and ("single", "not split") in groups


def test_rollouts_count_as_they_did_when_they_were_scored(tiny_tokenizer):
    """Scores of recorded rollouts that differ from those of the same rollouts in an evaluation."""
    for right, split in ((True, True), (False, False)):
        full = rollout(tiny_tokenizer, 1, 3, right, split)
        row = json.loads(json.dumps(trajectory_row(full, None, 7)))
        assert score_of(row) == score(full)
    cut = replace(full, status="out_of_turns", turns=(*full.turns[:1], replace(full.turns[1], answer=None)))
    assert score_of(trajectory_row(cut, None, 7)).em == 0.0 == score(cut).em


def test_intervals_and_shares_come_from_the_recorded_rollouts(run, html):
    """Intervals over questions of another step, or a cumulative share of other rollouts."""
    lines = {chart["id"]: chart["lines"] for chart in unpacked(html, "data")["charts"]}
    rows = [json.loads(line) for line in (run / "trajectories" / "000000.jsonl").read_text().splitlines()]
    single = [s for s in map(score_of, rows) if s.kind == "single"]
    (drawn,) = [x for x in lines["em"] if x["group"] == "single" and "low" in x]
    assert [drawn["low"][0], drawn["high"][0]] == pytest.approx(em_interval(single))
    last = [
        score_of(json.loads(line))
        for step in (10, 11)
        for line in (run / "trajectories" / f"{step:06d}.jsonl").read_text().splitlines()
    ]
    (finished,) = [x for x in lines["finished"] if x["group"] == "all" and x["name"] == "last"]
    assert finished["y"] == finished_by_turn(last)


def test_evaluations_of_a_run_stand_where_they_were_made(run, html, tmp_path):
    """The score after training plotted at the start, an interval for another sample size, or missing tables."""
    charts = {chart["id"]: chart["lines"] for chart in unpacked(html, "data")["charts"]}
    (line,) = charts["validation"]
    assert (line["x"], line["y"]) == ([0, 8, 12], [0.5, 0.7, 0.9])
    assert (line["low"][0], line["high"][0]) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # Wilson, 5 of 10
    assert "<td>0.500</td>" in html and "<td>before</td>" in html and "<td>0.01</td>" in html
    going_on = Path(shutil.copytree(run, tmp_path / "run"))
    (going_on / "summary.json").unlink()
    assert "not finished" in write([going_on]).read_text()


# ---- ids and passages ----


def test_sub_queries_stand_beside_their_own_passages():
    """A passage shown with a sub-query that it was not retrieved for, or lost where the budget cut others."""
    queries = ("who: a", "what b", "c")
    passages = ((Passage("1", "One", "first"), Passage("2", "Two", "second")), (), (Passage("3", "", "third"),))

    def written(budget: int, n: int = 3) -> list[list[str]]:
        ids = tags.render_observation(queries[:n], passages[:n], lambda text: list(text.encode()), budget)
        return passage_lines(bytes(ids).decode(), queries[:n], [len(f) for f in passages[:n]])

    complete = [["(One) first", "(Two) second"], ["nothing found"], ["third"]]
    assert written(400) == complete
    assert written(400, n=1) == complete[:1]
    cut = written(90)
    assert cut[0] == ["(One) first"] and cut[2] == ["third"]
    assert passage_lines(None, queries, [2, 0, 1]) == [[], [], []]


def test_every_id_has_its_text_and_log_prob(run, html, tiny_tokenizer):
    """A log-prob shown with another token than its own, or broken characters where tokens split them."""
    spelling = Spelling(tiny_tokenizer)
    ids = tiny_tokenizer.encode_foreign("Brünn 東京 é")
    assert "".join(spelling.pieces(ids)) == "Brünn 東京 é" and len(spelling.pieces(ids)) == len(ids)
    index = unpacked(html, "index")["columns"]
    row = json.loads((run / "trajectories" / "000005.jsonl").read_text().splitlines()[2])
    (place,) = [
        i
        for i in range(len(index["run"]))
        if (index["step"][i], index["sample"][i]) == (5, row["sample"]) and index["place"][i] == 2
    ]
    body = unpacked(html, f"block-{index['block'][place]}")[2]
    sampled = [(i, p) for i, p, m in zip(row["ids"], row["logprobs"], row["mask"], strict=True) if m]
    shown = [pair for turn in body["turns"] for pair in zip(turn["ids"], turn["logprobs"], strict=True)]
    assert shown == [(i, pytest.approx(p, abs=1e-4)) for i, p in sampled]
    assert "".join(body["turns"][0]["pieces"]) == row["turns"][0]["text"]
    assert body["turns"][0]["searches"][0][1][0][2].startswith("(Ada Lovelace) </script>")
    assert body["prompt"].startswith("Question: Who is older")


def test_an_initial_search_stands_before_the_first_turn(tiny_tokenizer):
    """The passages of a search that the model never requested, shown as a part of the prompt."""
    t = rollout(tiny_tokenizer, 1, 0, True, False)
    start, n = t.prompt_length, t.turns[0].n_sampled
    keep = np.r_[0:start, start + n : len(t.ids)]  # the host's tokens directly follow the prompt
    searched = replace(t.turns[0], text="", n_sampled=0)
    t = replace(t, ids=t.ids[keep], mask=t.mask[keep], logprobs=t.logprobs[keep])
    row = trajectory_row(replace(t, turns=(searched, t.turns[1])), None, 0)
    body = rollouts._body(row, Spelling(tiny_tokenizer))
    assert "information" not in body["prompt"] and body["prompt"].startswith("Question: ")
    assert body["turns"][0]["searches"][0][1][1] == ["", "p1", PASSAGES[1].text]
    assert "".join(body["turns"][1]["pieces"]).startswith("<think> é so")


def test_ids_of_another_tokenizer_are_not_shown(tiny_tokenizer, tokenizer):
    """Words that were never sampled, because the run's tokenizer was replaced."""
    row = trajectory_row(rollout(tiny_tokenizer, 1, 0, True, True), None, 0)
    assert "pieces" in rollouts._body(row, Spelling(tiny_tokenizer))["turns"][0]
    shown = rollouts._body(row, Spelling(tokenizer))
    assert shown["turns"][0]["text"] == row["turns"][0]["text"] and "pieces" not in shown["turns"][0]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000])
def test_what_is_kept_is_spread_over_the_run(count):
    """A page with only the first steps, or a step that is offered twice or never."""
    order = spread_out(count)
    assert sorted(order) == list(range(count))
    if count > 60:
        assert np.diff(sorted(order[:17])).max() <= 2 * count / 16


def test_rollouts_that_have_no_room_are_told(run, monkeypatch):
    """A page that looks complete but leaves rollouts out."""
    monkeypatch.setattr(rollouts, "MOST_ROLLOUTS", 20)
    html = page.render(read_runs([run]))
    assert "18 of 72 recorded rollouts" in html
    assert set(unpacked(html, "index")["columns"]["step"]) == {0, 11, 5}
    monkeypatch.setattr(rollouts, "MOST_ROLLOUTS", 4)  # fewer than the first step has
    assert "4 of 72 recorded rollouts" in page.render(read_runs([run]))
    monkeypatch.setattr(rollouts, "MOST_BYTES", 1)
    assert "None of the 72 recorded rollouts fits" in page.render(read_runs([run]))


def test_a_run_without_rollouts_or_steps(run, tmp_path):
    """A division by zero where nothing was recorded, or before the first step."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    for file in (copy / "trajectories").iterdir():
        file.write_text("")  # as train.trajectories_per_step=0 leaves them
    html = write([copy]).read_text()
    assert "No rollouts were recorded." in html and 'id="chart-reward"' in html and 'id="chart-finished"' not in html
    (copy / "metrics.jsonl").write_text("")
    assert 'id="chart-reward"' not in write([copy]).read_text()


# ---- bad input ----


def test_a_broken_line_is_named(tmp_path, run):
    """A traceback of the JSON parser, or a run that cannot be viewed while it is being written."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "rew')
    assert len(read_metrics(copy / "metrics.jsonl")) == 12
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:13: cannot be read .* accepted: a JSON object"):
        write([copy])
    shutil.copy(run / "metrics.jsonl", copy)
    with (copy / "trajectories" / "000003.jsonl").open("a") as file:
        file.write('{"turns": []}\n')
    with pytest.raises(UserError, match=r"000003.jsonl:7: field 'golden_answers' not found"):
        write([copy])
    file = copy / "trajectories" / "000003.jsonl"
    *rows, last = map(json.loads, (run / "trajectories" / "000003.jsonl").read_text().splitlines())
    for field in ("question", "logprobs", "mask"):  # read only when the page shows the rollout
        damaged = [*rows, {name: value for name, value in last.items() if name != field}]
        file.write_text("".join(json.dumps(row) + "\n" for row in damaged))
        with pytest.raises(UserError, match=rf"000003.jsonl:6: field '{field}' not found"):
            write([copy])
    assert not list(copy.glob("*.tmp"))


def test_a_run_has_the_name_of_its_directory(run, monkeypatch):
    """`launch/report.py .` makes a page whose title and tables name no run."""
    monkeypatch.chdir(run)
    assert [read_runs([d])[0].name for d in (".", str(run), f"../{run.name}/")] == [run.name] * 3


def test_directories_that_make_no_page(tmp_path, run, tiny_tokenizer):
    """An empty page for a mistyped directory, or for results that cannot share a chart."""
    with pytest.raises(UserError, match="neither metrics.jsonl nor results.json found"):
        write([tmp_path])
    with pytest.raises(UserError, match="an evaluation found next to a training run"):
        write([run, write_evaluation(tmp_path / "e", tiny_tokenizer, 0.5)])


def test_a_run_is_not_lost_with_its_report(tmp_path, caplog):
    """A run of days that exits with an error code because its report could not be written."""
    with caplog.at_level(logging.WARNING, "psearch_jax"):
        page.offer_report(tmp_path)
    assert "no report was written" in caplog.text


def test_program_prints_tables_and_writes_the_page(tmp_path, tiny_tokenizer):
    """Tables whose format changed for programs that parse them, or a page whose path is not printed."""
    evaluation = write_evaluation(tmp_path / "e", tiny_tokenizer, 0.5)
    done = completed(["launch/report.py", evaluation, f"--html={tmp_path / 'page.html'}"])
    assert done.returncode == 0 and done.stdout == (evaluation / "results.md").read_text(), done.stderr
    assert f"report: {tmp_path / 'page.html'}" in done.stderr and (tmp_path / "page.html").is_file()
    wrong = completed(["launch/report.py", tmp_path])
    assert wrong.returncode == 2 and len(wrong.stderr.strip().splitlines()) == 1


# ---- in a browser ----


def show(browser, file: Path, width: int = 1280, scheme: str = "light") -> None:
    """Opens a page and waits until everything is drawn."""
    opened(browser, file.as_uri(), width, scheme)
    wait(browser, "const d = document.documentElement.dataset; return d.drawn && d.browser === 'ready'")
    wait(browser, "return document.querySelector('#left h3') !== null")


def check_quiet(browser) -> None:
    """Nothing on the console, and no network request."""
    urls = asked(browser)
    assert urls and all(url.startswith(("file:", "data:", "blob:")) for url in urls), urls


DRAWN = """return [...document.querySelectorAll('.chart')].map(chart => [chart.id,
    chart.querySelectorAll('.scatterlayer .trace, .barlayer .trace').length])"""


def test_page_in_a_browser(browser, run, html):
    """An empty chart, an error on the console, a request to a server, or a passage that runs as a script."""
    assert len(html.encode()) < 10e6
    show(browser, run / "report.html")
    data = unpacked(html, "data")
    drawn = dict(browser.execute_script(DRAWN))
    assert set(drawn) == {f"chart-{chart['id']}" for chart in data["charts"]} and len(drawn) > 15
    assert all(drawn.values()), drawn
    assert HOSTILE.split("born")[0].strip() in text(browser, "#left .passages")
    assert text(browser, "#left h3") == "Who is older, <b>0</b>?"
    assert browser.execute_script("return window.forged") is None
    check_quiet(browser)


def test_filters_by_keyboard(browser, run, html):
    """Rollouts that only a mouse can reach, or a count that differs from the list."""
    from selenium.webdriver.common.keys import Keys

    show(browser, run / "report.html")
    columns = unpacked(html, "index")["columns"]
    incorrect = sum(not correct for correct in columns["correct"])
    assert text(browser, "#count").startswith("72 of 72 rollouts, ")
    focus(browser, "select[data-column=correct]")
    press(browser, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    wait(
        browser, f"return document.querySelector('#count').textContent === '{incorrect} of 72 rollouts, 0.0% correct'"
    )
    assert browser.execute_script("return document.querySelectorAll('#list .correct').length") == 0
    press(browser, Keys.ARROW_UP, Keys.ARROW_UP)
    focus(browser, "select[data-column=kind]")
    press(browser, "si")
    kinds = columns["kind"].count("single")
    wait(browser, f"return document.querySelector('#count').textContent.startsWith('{kinds} of 72 ')")
    focus(browser, "#from")
    press(browser, "11")
    last = sum(k == "single" and s == 11 for k, s in zip(columns["kind"], columns["step"], strict=True))
    wait(browser, f"return document.querySelector('#count').textContent.startsWith('{last} of 72 ')")
    focus(browser, "#filters button")
    press(browser, Keys.ENTER)
    wait(browser, "return document.querySelector('#count').textContent.startsWith('72 of 72 ')")

    focus(browser, "#list")
    press(browser, Keys.END)
    wait(browser, "return document.querySelector('#left .facts').textContent.includes('step 11')")
    selected = "[...document.querySelectorAll('#list li')].filter(li => li.getAttribute('aria-selected') === 'true')"
    assert browser.execute_script(f"return {selected}.map(li => li.dataset.place)") == ["71"]
    check_quiet(browser)


def test_log_probs_by_pointer_and_by_keyboard(browser, run):
    """A log-prob that cannot be displayed, or that belongs to another token."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    show(browser, run / "report.html")
    row = json.loads((run / "trajectories" / "000000.jsonl").read_text().splitlines()[0])
    first = row["mask"].index(1)
    focus(browser, "#left .sampled")
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    expected_tip = f"(token {row['ids'][first + 2]}): log-prob {row['logprobs'][first + 2]:.4f}"
    assert expected_tip in text(browser, "#tip")
    press(browser, Keys.ESCAPE)
    assert browser.execute_script("return document.querySelector('#tip').hidden")
    ActionChains(browser).move_to_element(browser.find_element(By.CSS_SELECTOR, "#left [data-at='1']")).perform()
    assert f"(token {row['ids'][first + 1]}): log-prob" in text(browser, "#tip")


def test_the_same_question_at_two_steps(browser, run):
    """A comparison with another question, or one that stays when another rollout is chosen."""
    from selenium.webdriver.common.keys import Keys

    show(browser, run / "report.html")
    focus(browser, "#left select")
    press(browser, Keys.ARROW_DOWN)
    wait(browser, "return document.querySelector('#right h3') !== null")
    assert text(browser, "#right h3") == text(browser, "#left h3")
    assert "step 0," in text(browser, "#left .facts") and "step 4," in text(browser, "#right .facts")
    focus(browser, "#list")
    press(browser, Keys.ARROW_DOWN)
    wait(browser, "return document.querySelector('#right').hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_and_dark(browser, run, html, scheme):
    """A page that scrolls sideways on a phone, or stays white in dark mode."""
    show(browser, run / "report.html", 400, scheme)
    assert browser.execute_script("const e = document.documentElement; return e.scrollWidth - e.clientWidth") == 0
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) > 600) == (scheme == "light")
    check_quiet(browser)


def test_runs_and_their_alarms_laid_over_one_another(browser, run, tmp_path, tiny_tokenizer):
    """A run that is missing from a chart, or an alarm that is not shown."""
    other = write_run(tmp_path / "two", tiny_tokenizer, steps=6, alarm=4)
    show(browser, write([run, other], tmp_path / "both.html"))
    assert "two: kl_high, 1 step, first at step 4." in " ".join(text(browser, "#alarms").split())
    names = browser.execute_script("return document.getElementById('chart-reward').data.map(t => [t.name, t.x])")
    assert names == [["one", list(range(12))], ["two", list(range(6))], ["two: kl_high", [4]]]
    assert all(dict(browser.execute_script(DRAWN)).values())
    check_quiet(browser)


def test_evaluations_in_a_browser(browser, tmp_path, tiny_tokenizer):
    """An evaluation whose page has no charts, no intervals or no rollouts."""
    outs = [write_evaluation(tmp_path / name, tiny_tokenizer, right) for name, right in (("a", 0.3), ("b", 0.9))]
    show(browser, write(outs))
    scores = json.loads((outs[1] / "results.json").read_text())["benchmarks"]["popqa"]["all"]
    bars = browser.execute_script("return document.getElementById('chart-em').data.map(t => [t.y, t.error_y.array])")
    assert bars[3][0][0] == scores["em"] and bars[3][1][0] == pytest.approx(scores["em_interval"][1] - scores["em"])
    assert all(dict(browser.execute_script(DRAWN)).values())
    assert text(browser, "#count").startswith("36 of 36 rollouts")
    check_quiet(browser)


def test_a_thousand_steps_and_ten_thousand_rollouts(browser, tmp_path, tiny_tokenizer):
    """A page that hangs on a long run: a list of ten thousand entries, or all texts unpacked at once."""
    from selenium.webdriver.common.keys import Keys

    run = write_run(tmp_path / "long", tiny_tokenizer, steps=4)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(rows[s % 4] | {"step": s}) + "\n" for s in range(1000)))
    texts = [(run / "trajectories" / f"{s:06d}.jsonl").read_text().splitlines() for s in range(4)]
    for s in range(1000):
        lines = (texts[s % 4] * 2)[:10]
        (run / "trajectories" / f"{s:06d}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    file = write([run])
    assert file.stat().st_size < 10e6
    show(browser, file)
    assert text(browser, "#count").startswith("10000 of 10000 ")
    assert browser.execute_script("return document.querySelectorAll('#list li').length") == 50
    focus(browser, "#list")
    press(browser, Keys.END)
    wait(browser, "return document.querySelector('#left .facts').textContent.includes('step 999')")
    focus(browser, "select[data-column=correct]")
    press(browser, Keys.ARROW_DOWN)
    wait(browser, "return document.querySelector('#count').textContent.endsWith(', 100.0% correct')")
    check_quiet(browser)
