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

from psearch_jax.eval.evaluate import evaluate_benchmarks, trajectory_row, write_results
from psearch_jax.eval.scores import figures, score
from psearch_jax.eval.tables import results
from psearch_jax.report import charts, page, rollouts
from psearch_jax.report.runs import read_lines, read_runs
from psearch_jax.runtime.metrics import MetricsWriter
from psearch_jax.text import tags
from psearch_jax.types import Question, RewardParts, Trajectory, Turn, UserError
from retrieval.protocol import Passage

HOSTILE = "</script><script>window.forged = 1</script><img src=x onerror='window.forged = 1'> born in Brünn"
PASSAGES = (Passage("p0", HOSTILE, HOSTILE), Passage("p1", "", "Alan Turing was born in 1912."))
KINDS = ("parallel", "sequential", "single")


def rollout(tokenizer, number: int, sample: int, right: bool, split: bool) -> Trajectory:
    """A rollout of one search and one answer, rendered by the project's own functions."""
    question = Question("test", f"q{number}", f"Who is older, <b>{number}</b>?", ("Ada",), KINDS[number % 3])
    queries = ("Ada Lovelace born", "Alan Turing born in Brünn")[: 2 if split else 1]
    search = f"<think> who </think> <search> {' ## '.join(queries)} </search>"
    answer = f"<think> é so </think> <answer> {'Ada' if right else 'Alan'} </answer>"
    passages = tuple(PASSAGES for _ in queries)
    parts = [
        (tokenizer.encode_foreign(f"Question: {question.text}\n"), False),
        (tokenizer.encode_foreign(search), True),
        (tags.render_observation(queries, passages, tokenizer.encode_foreign, 400).ids, False),
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


def write_run(directory: Path, tokenizer, steps: int = 4, alarm: int | None = None) -> Path:
    """A run directory, six rollouts of three questions a step. Metrics go through the writer of training runs."""
    directory.mkdir()
    config = {"seed": 0, "method": "parallelsearch", "model": {"path": "", "tokenizer": tokenizer.name}}
    (directory / "config.json").write_text(json.dumps(config | {"train": {"steps": steps}}))
    (directory / "trajectories").mkdir()
    moments = {name: {"parallel": {"em": em, "turns": 2.0}} for name, em in (("before", 0.5), ("after", 0.9))}
    (directory / "summary.json").write_text(json.dumps({"steps": steps} | moments))
    rng, writer = np.random.default_rng(0), MetricsWriter(directory)
    for step in range(steps):
        values = {"reward": float(rng.random()), "kl": float("nan"), "em/parallel": 0.5}
        values |= {} if alarm is None else {"alarm/kl_high": float(step == alarm)}
        writer.write(step, values)
        rows = []
        for number in range(6):
            trajectory = rollout(tokenizer, number // 2, number % 2, rng.random() < 0.7, rng.random() < 0.5)
            rows.append(trajectory_row(trajectory, RewardParts({"outcome": 1.0, "short_answers": 0.5}, 1.5), step))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / "trajectories" / f"{step:06d}.jsonl").write_text(lines)
    writer.close()
    return directory


def write_evaluation(directory: Path, tokenizer, right: float) -> Path:
    """An evaluation of two benchmarks, written by the class that launch/eval.py uses."""
    rng = np.random.default_rng(1)
    by_name = {
        name: [rollout(tokenizer, 10 * k + i, 0, bool(rng.random() < right), True) for i in range(9)]
        for k, name in enumerate(("nq", "popqa"))
    }
    questions = {n: [t.question for t in ts] for n, ts in by_name.items()}
    by_question = {t.question.id: t for ts in by_name.values() for t in ts}

    def roll_out(asked, progress):
        return [by_question[q.id] for q in asked]

    scores = evaluate_benchmarks(directory, questions, {"method": "us"}, roll_out, 5)
    benchmarks = {name: figures(group) for name, group in scores.items()}
    write_results(directory, {"model": "toy", "benchmarks": benchmarks}, results(benchmarks, "us") + "\n")
    return directory


def write(directories: list[Path]) -> Path:
    return page.write_report(read_runs(directories))


def unpacked(html: str) -> list[dict]:
    letters = re.search(r'id="data">([^<]*)</script>', html).group(1)
    return json.loads(gzip.decompress(base64.b64decode(letters)))["rollouts"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_tokenizer) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "one", tiny_tokenizer, alarm=2)


@pytest.fixture(scope="module")
def html(run) -> str:
    return write([run]).read_text(encoding="utf-8")


def test_rollouts_are_shown_as_sampled(run, html, tiny_tokenizer):
    """The segments spell the recorded tokens, with their log-probs, and facts equal those of the scorer."""
    shown = unpacked(html)
    rows = [row for file in sorted((run / "trajectories").iterdir()) for row in read_lines(file)]
    assert len(shown) == len(rows) == 24
    for entry, row in zip(shown, rows, strict=True):
        texts = [s if isinstance(s, str) else "".join(piece for piece, _, _ in s) for s in entry["segments"]]
        assert "".join(texts) == tiny_tokenizer.decode(row["ids"], control=True)
        sampled = [token for s in entry["segments"] if not isinstance(s, str) for token in s]
        assert [[logprob, i] for _, logprob, i in sampled] == [
            [logprob, i] for logprob, i, m in zip(row["logprobs"], row["ids"], row["mask"], strict=True) if m
        ]
    first = score(rollout(tiny_tokenizer, 0, 0, shown[0]["correct"] == "correct", shown[0]["split"] == "split"))
    assert (first.em > 0, first.split) == (shown[0]["correct"] == "correct", shown[0]["split"] == "split")
    assert shown[0]["reward"] == {"outcome": 1.0, "short_answers": 0.5, "total": 1.5}
    assert "kl_high, 1 steps, first at step 2" in html and "0.500 -&gt; 0.900" not in html and "0.900" in html


def test_a_share_of_zero_is_drawn(run):
    """A run that never splits is a line at 0, not missing."""
    (described,) = read_runs([run])
    rows = [{**row, "split/parallel": 0.0} for row in described.rows]
    drawn = {figure.layout.title.text: figure.data for figure in charts.draw_training([replace(described, rows=rows)])}
    assert [list(line.y) for line in drawn["Questions split"]] == [[0.0] * 4]


def test_hostile_texts_stay_text(html, run, tmp_path, tiny_tokenizer):
    """Texts of passages, questions and names are escaped or compressed, in runs and evaluations."""
    outside = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert "forged" not in html and "onerror" not in outside
    named = write_run(tmp_path / "<img src=x onerror=forged>", tiny_tokenizer, steps=1)
    assert "<img src=x" not in write([named]).read_text()
    evaluation = write([write_evaluation(tmp_path / "e", tiny_tokenizer, 0.5)]).read_text()
    assert "forged" not in evaluation and len(unpacked(evaluation)) == 18


def test_a_long_run_is_sampled_evenly(run, monkeypatch):
    """The page says how many rollouts it leaves out; those that it has range from the first step to the last."""
    monkeypatch.setattr(rollouts, "MAX_ROLLOUTS", 12)
    html = page.render(read_runs([run]))
    assert "12 of 24 recorded rollouts" in html and {entry["part"] for entry in unpacked(html)} == {"0", "2"}
    assert rollouts.spread_out(5) == [0, 4, 2, 1, 3] and sorted(rollouts.spread_out(100)) == list(range(100))


def test_rollouts_without_their_tokenizer_are_shown(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "config.json").write_text('{"model": {"tokenizer": "nobody/nothing"}}')
    texts = [s for s in unpacked(write([copy]).read_text())[0]["segments"] if not isinstance(s, str)]
    assert texts[0][0][0].startswith("<think> who </think>")
    for file in (copy / "trajectories").iterdir():
        file.write_text("")
    (copy / "metrics.jsonl").write_text("")
    assert "0 of 0 recorded rollouts" in write([copy]).read_text()


def test_bad_directories_get_one_line(tmp_path, run, tiny_tokenizer):
    """A broken line is named, the line being written is skipped, and runs are not mixed with evaluations."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "rew')
    assert len(read_runs([copy])[0].rows) == 4
    with (copy / "trajectories" / "000003.jsonl").open("a") as file:
        file.write('{"turns": []}\n')
    with pytest.raises(UserError, match=r"000003.jsonl:7: field 'status' not found|field '\w+' not found"):
        write([copy])
    with pytest.raises(UserError, match="neither metrics.jsonl nor results.json found"):
        write([tmp_path])
    with pytest.raises(UserError, match="an evaluation found next to a training run"):
        write([run, write_evaluation(tmp_path / "e", tiny_tokenizer, 0.5)])
    (tmp_path / "sft").mkdir()
    with closing(MetricsWriter(tmp_path / "sft")) as writer:
        writer.write(1, {"loss": 1.0})
    with pytest.raises(UserError, match="a run of launch/sft.py found"):
        read_runs([tmp_path / "sft"])


def test_a_failed_report_does_not_end_a_run(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "psearch_jax"):
        page.offer_report(tmp_path)
    assert "no report was written" in caplog.text


def test_the_program_prints_tables_and_writes_the_page(tmp_path, tiny_tokenizer):
    outs = [write_evaluation(tmp_path / name, tiny_tokenizer, right) for name, right in (("a", 0.3), ("b", 0.9))]
    done = completed(["launch/report.py", *outs, f"--html={tmp_path / 'page.html'}"])
    assert done.returncode == 0 and "| nq | EM |" in done.stdout, done.stderr
    assert "95% interval" in (tmp_path / "page.html").read_text()


def test_the_page_in_a_browser(browser, run, html):
    """Charts are drawn, a rollout is found and compared by keyboard, and nothing is requested or logged."""
    from selenium.webdriver.common.keys import Keys

    opened(browser, (run / "report.html").as_uri())
    wait(browser, "return document.documentElement.dataset.ready === 'yes'")
    assert browser.execute_script("return document.querySelectorAll('.scatterlayer .trace').length") >= 2
    assert text(browser, "#left h3") == "Who is older, <b>0</b>?"
    assert HOSTILE.split("born")[0].strip() in text(browser, "#left")
    focus(browser, "#left select")
    press(browser, Keys.ARROW_DOWN)
    wait(browser, "return document.querySelector('#right h3') !== null")
    assert text(browser, "#right h3") == text(browser, "#left h3")
    focus(browser, "#list")
    press(browser, Keys.END)
    wait(browser, "return document.querySelector('#left p').textContent.startsWith('3, sample 1')")
    focus(browser, "[name=correct]")
    press(browser, Keys.ARROW_DOWN)
    wait(browser, "return !document.querySelector('#count').textContent.startsWith('24 of 24')")
    correct = sum(entry["correct"] == unpacked(html)[0]["correct"] for entry in unpacked(html))
    assert text(browser, "#count").startswith(f"{correct} of 24 rollouts")
    assert browser.execute_script("return window.forged") is None
    urls = asked(browser)
    assert urls and all(url.startswith(("file:", "data:", "blob:")) for url in urls), urls
