"""Prints finished runs side by side, or compares evaluations of the same questions, and draws both in one HTML page.

    python launch/report.py WORKDIR [WORKDIR ...] [--html=FILE]
    python launch/report.py OUT [OUT ...] [--html=FILE]

An OUT of launch/eval.py is compared with the first one: differences of EM, turns and tokens, with paired bootstrap
intervals, p by a permutation test, and ratios. The page is report.html in the first directory, or FILE; it holds
charts and rollouts and needs no network. It is also drawn of a run that has not finished.
"""

import sys
from pathlib import Path

from absl import flags

from psearch_jax import launching
from psearch_jax.paths import locate
from psearch_jax.types import UserError

HTML = flags.DEFINE_string("html", None, "Where to write the page; default: report.html in the first directory.")


def main(argv: list[str]) -> None:
    if len(argv) < 2:
        raise UserError("no directory found, accepted: one or more of launch/train.py, or of launch/eval.py")
    from psearch_jax.report import page, tables

    if all((locate(d) / "results.json").is_file() for d in argv[1:]):
        from psearch_jax.eval.evaluate import read_scores
        from psearch_jax.eval.tables import paired_table

        if len(argv) == 2:
            print((locate(argv[1]) / "results.md").read_text(encoding="utf-8"), end="")
        for other in argv[2:]:
            pair = [
                (d if Path(argv[1]).name == Path(other).name else Path(d).name, read_scores(d))
                for d in (argv[1], other)
            ]
            print(paired_table(*pair), end="\n\n" if other != argv[-1] else "\n")
    else:
        unfinished = [d for d in argv[1:] if _going_on(d)]
        for d in unfinished:
            print(f"{d}: has not finished; it is in the page, not in the tables", file=sys.stderr)
        runs = [(Path(d).name, tables.read_summary(d)) for d in argv[1:] if d not in unfinished]
        if runs:
            print(tables.before_and_after(runs[0][1]) if len(runs) == 1 else tables.side_by_side(runs))
    file = page.write_report(argv[1:], HTML.value)
    print(f"report: {file}", file=sys.stderr)


def _going_on(directory: str) -> bool:
    """Whether it is a run that has no summary yet."""
    path = locate(directory)
    return (path / "metrics.jsonl").is_file() and not (path / "summary.json").is_file()


if __name__ == "__main__":
    launching.run(main, positional=True)
