"""The report on runs or evaluations: one self-contained HTML file with charts and rollouts, for offline use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from psearch_jax.eval.benchmarks import PAIRS
from psearch_jax.eval.evaluate import read_scores
from psearch_jax.eval.scores import Score
from psearch_jax.eval.tables import cells_of, paired_table
from psearch_jax.report import charts, tables, training
from psearch_jax.report.rollouts import Shown, packed, packed_bytes, spelling_of, spread_out
from psearch_jax.report.runs import RunFiles, read_runs
from psearch_jax.runtime.paths import is_store_error, locate, make_writable, write_atomically
from psearch_jax.types import END_STATUSES, KINDS, UserError

log = logging.getLogger("psearch_jax")
FILE = "report.html"


def write_report(runs: Sequence[RunFiles], file: str | Path | None = None) -> Path:
    """Writes one page with these runs overlaid, and returns its path.

    Args:
      file: default: report.html in the directory of the first run.

    Raises:
      UserError: one of their files cannot be read, or plotly is not installed.
      OSError: the page cannot be written.
    """
    path = locate(file) if file else runs[0].directory / FILE
    make_writable(path.parent)
    write_atomically(path, render(runs))
    return path


def offer_report(directory: str | Path) -> None:
    """Writes the page of a run that has just ended and logs its path; a failure is only a warning."""
    try:
        log.info("report: %s", write_report(read_runs([directory])))
    except Exception as error:
        if not (isinstance(error, UserError | OSError) or is_store_error(error)):
            raise
        log.warning("no report was written: %s", error)


def render(runs: Sequence[RunFiles]) -> str:
    """The page."""
    plotly = _plotly()
    shown = Shown(len(runs))
    trained = runs[0].trained
    scores = [_take(i, run, shown) for i, run in enumerate(runs)]
    if trained:
        drawn = training.training_charts(runs, scores)
        there = {line.group for chart in drawn for line in chart.lines}
        groups = [group for group in (*KINDS, PAIRS) if group in there]
    else:
        drawn = charts.evaluation_charts(runs, scores)
        groups = list(dict.fromkeys(name for by in scores for name in by))
    data = {
        "runs": [{"name": run.name, "steps": [row["step"] for row in run.rows]} for run in runs],
        "groups": groups,
        "charts": [chart.as_json() for chart in drawn],
        "alarms": training.alarms(runs),
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_asset("page.html.j2"))
    return template.render(
        title=", ".join(run.name for run in runs),
        trained=trained,
        runs=[_facts(run) for run in runs],
        sections=list(dict.fromkeys(chart.section for chart in drawn)),
        charts=drawn,
        groups=groups,
        alarms=[(run.name, fired) for run, fired in zip(runs, data["alarms"], strict=True) if fired],
        parts=_tables(runs),
        facets=_facets(runs, shown),
        recorded=len(shown.columns["run"]),
        left_out=shown.left_out,
        blocks=shown.blocks,
        data=packed(data),
        index=packed(shown.index()),
        plotly=packed_bytes(plotly),
        css=_asset("page.css"),
        scripts=[_asset("data.js"), _asset("charts.js"), _asset("rollout.js"), _asset("browser.js")],
    )


def _take(number: int, run: RunFiles, shown: Shown) -> dict[Any, list[Score]]:
    """Offers all rollouts of a run to the page. Returns their scores by step or by benchmark."""
    spelling = spelling_of(run) if run.blocks else None
    parts: dict[int, list[Score]] = {}
    for place in spread_out(len(run.blocks)):
        block = run.blocks[place]
        rows = list(block.rows())
        parts[place] = block.scores(rows)
        shown.offer(number, block, rows, parts[place], spelling)
    scores: dict[Any, list[Score]] = {}
    for place, block in enumerate(run.blocks):
        scores.setdefault(block.step if run.trained else block.benchmark, []).extend(parts[place])
    return scores


def _facts(run: RunFiles) -> dict[str, Any]:
    """The run's row in the page's table of runs."""
    config, summary = run.config, run.summary
    wall = summary.get("wall_s", {}).get("total")
    of = (config.get("train") or {}).get("steps")
    done = run.rows[-1]["step"] + 1 if run.rows else 0
    model = run.results.get("model") if run.results else (config.get("model") or {}).get("path")
    return {
        "name": run.name,
        "model": model or "",
        "method": config.get("method", ""),
        "seed": config.get("seed", ""),
        "steps": f"{done} of {of}" if of else str(done),
        "hours": f"{wall / 3600:.2f}" if wall else "not finished",
        "temperature": config.get("temperature", ""),
    }


def _facets(runs: Sequence[RunFiles], shown: Shown) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(column, label, [(value, text)]) of every filter; run and benchmark only if there are several."""
    there = {name: set(shown.columns[name]) for name in ("run", "benchmark", "kind", "status", "split")}
    first = [("run", "Run", [(str(i), run.name) for i, run in enumerate(runs) if i in there["run"]])]
    if not runs[0].trained:
        first.append(("benchmark", "Benchmark", [(name, name) for name in sorted(there["benchmark"])]))
    first_searches = [("split", "split"), ("not_split", "not split"), ("no_search", "no search")]
    return [row for row in first if len(row[2]) > 1] + [
        ("kind", "Question type", [(kind, kind) for kind in KINDS if kind in there["kind"]]),
        ("correct", "Answer", [("1", "correct"), ("0", "incorrect")]),
        ("status", "End status", [(s, s.replace("_", " ")) for s in END_STATUSES if s in there["status"]]),
        ("split", "First search", first_searches),
    ]


def _tables(runs: Sequence[RunFiles]) -> list[str | list[list[str]]]:
    """The output of launch/report.py as paragraphs and tables (rows of cells; the first is the header)."""
    if runs[0].trained:
        finished = [(run.name, run.summary) for run in runs if run.summary]
        text = tables.side_by_side(finished) if len(runs) > 1 else ""
        if len(runs) == 1 and finished:
            text = tables.before_and_after(finished[0][1])
    elif len(runs) == 1:
        file = runs[0].directory / "results.md"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
    else:
        ours, *others = ((run.name, read_scores(run.directory)) for run in runs)
        text = "\n\n".join(paired_table(ours, other) for other in others)
    return [_cells(part) for part in text.strip().split("\n\n") if part]


def _cells(part: str) -> str | list[list[str]]:
    """A part of a Markdown text: the rows of a table without its `---` line, or the paragraph unchanged."""
    lines = part.splitlines()
    if not lines[0].startswith("|") or len(lines) < 3:
        return part if not lines[0].startswith("|") else ""
    rows = [cells_of(line) for line in lines]
    return [rows[0], *rows[2:]]


def _asset(name: str) -> str:
    return resources.files("psearch_jax.report").joinpath("assets", name).read_text(encoding="utf-8")


def _plotly() -> bytes:
    """Plotly's JavaScript from its Python package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("plotly: not installed, but needed for the charts of a report; `pip install plotly`") from None
    return get_plotlyjs().encode()
