"""Compares runs, or evaluations of the same questions: tables on stdout, and one HTML page with charts and rollouts.

    python launch/report.py WORKDIR [WORKDIR ...] [--html=FILE]
    python launch/report.py OUT [OUT ...] [--html=FILE]

OUT is a directory of launch/eval.py. Each further OUT is compared with the first: differences of EM, turns and tokens,
with paired bootstrap intervals, p-values of a permutation test, and ratios. The page is report.html in the first
directory, or FILE, and needs no network. A run that has not finished is in the page but not in the tables.
"""

import sys

from absl import flags

from psearch_jax.runtime import cli

HTML = flags.DEFINE_string("html", None, "File for the page; default: report.html in the first directory.")


def main(argv: list[str]) -> None:
    from psearch_jax.eval.evaluate import read_scores
    from psearch_jax.eval.tables import paired_table
    from psearch_jax.report import page, tables
    from psearch_jax.report.runs import read_runs

    runs = read_runs(argv[1:])
    if runs[0].trained:
        for run in runs:
            if not run.summary:
                print(f"{run.directory}: not finished; it is in the page, but not in the tables", file=sys.stderr)
            elif not run.summary.get("after"):
                print(f"{run.directory}: has no validation questions, so it is not in the tables", file=sys.stderr)
        finished = [(run.name, run.summary) for run in runs if run.summary.get("after")]
        if finished:
            print(tables.before_and_after(finished[0][1]) if len(runs) == 1 else tables.side_by_side(finished))
    elif len(runs) == 1:
        print((runs[0].directory / "results.md").read_text(encoding="utf-8"), end="")
    else:
        first, *others = ((run.name, read_scores(run.directory)) for run in runs)
        print("\n\n".join(paired_table(first, other) for other in others))
    print(f"report: {page.write_report(runs, HTML.value)}", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main, positional=True)
