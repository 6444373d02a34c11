"""The report on runs or evaluations: one self-contained HTML file with charts and rollouts, for offline use."""

from __future__ import annotations

import base64
import gzip
import logging
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import orjson

from psearch_jax.eval.evaluate import read_scores
from psearch_jax.eval.tables import cells_of, paired_table
from psearch_jax.report import charts, tables
from psearch_jax.report.rollouts import select_rollouts
from psearch_jax.report.runs import RunFiles, read_runs
from psearch_jax.runtime.paths import is_store_error, locate, make_writable, write_atomically
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")


def write_report(runs: Sequence[RunFiles], file: str | Path | None = None) -> Path:
    """Writes one page with these runs overlaid, and returns its path.

    Args:
      file: default: report.html in the directory of the first run.

    Raises:
      UserError: one of their files cannot be read.
      OSError: the page cannot be written.
    """
    path = locate(file) if file else runs[0].directory / "report.html"
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
    """The page. Texts of runs are escaped by the template, or compressed in base64."""
    from plotly.offline import get_plotlyjs  # slow to import

    figures = list(charts.draw_training(runs) if runs[0].trained else charts.draw_evaluations(runs))
    for figure in figures:
        figure.update_layout(template="plotly_white", height=300, margin={"l": 45, "r": 10, "t": 40, "b": 30})
    rollouts, left_out = select_rollouts(runs)
    data = orjson.dumps({"runs": [run.name for run in runs], "rollouts": rollouts})
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    assets = resources.files("psearch_jax.report").joinpath("assets")
    template, viewer = (assets.joinpath(name).read_text(encoding="utf-8") for name in ("page.html.j2", "viewer.js"))
    options = {"full_html": False, "include_plotlyjs": False, "config": {"displayModeBar": False}}
    return environment.from_string(template).render(
        title=", ".join(run.name for run in runs),
        runs=runs,
        alarms=[(run.name, list_alarms(run)) for run in runs],
        tables=[split_cells(part) for part in make_tables(runs).strip().split("\n\n") if part],
        charts=[figure.to_html(**options, div_id=f"chart-{i}") for i, figure in enumerate(figures)],
        shown=len(rollouts),
        left_out=left_out,
        data=base64.b64encode(gzip.compress(data, 6, mtime=0)).decode(),
        plotly=get_plotlyjs(),
        viewer=viewer,
    )


def list_alarms(run: RunFiles) -> dict[str, list[int]]:
    """The steps at which each alarm fired (`alarm/NAME` above 0 in metrics.jsonl)."""
    fired: dict[str, list[int]] = {}
    for row in run.rows:
        for key, value in row.items():
            if key.startswith("alarm/") and value:
                fired.setdefault(key.removeprefix("alarm/"), []).append(row["step"])
    return fired


def make_tables(runs: Sequence[RunFiles]) -> str:
    """The output of launch/report.py: Markdown tables, and paragraphs."""
    if runs[0].trained:
        finished = [(run.name, run.summary) for run in runs if run.summary.get("after")]
        if not finished:
            return ""
        return tables.before_and_after(finished[0][1]) if len(runs) == 1 else tables.side_by_side(finished)
    if len(runs) == 1:
        file = runs[0].directory / "results.md"
        return file.read_text(encoding="utf-8") if file.is_file() else ""
    first, *others = ((run.name, read_scores(run.directory)) for run in runs)
    return "\n\n".join(paired_table(first, other) for other in others)


def split_cells(part: str) -> str | list[list[str]]:
    """A part of a Markdown text: the rows of a table without its `---` line, or the paragraph unchanged."""
    rows: list[Any] = [cells_of(line) for line in part.splitlines()]
    return [rows[0], *rows[2:]] if part.startswith("|") and len(rows) > 2 else part
