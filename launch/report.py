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
    from psearch_jax.report import page
    from psearch_jax.report.runs import read_runs

    runs = read_runs(argv[1:])
    for run in runs:
        if run.trained and not run.summary:
            print(f"{run.directory}: not finished; it is in the page, but not in the tables", file=sys.stderr)
        elif run.trained and not run.summary.get("after"):
            print(f"{run.directory}: has no validation questions, so it is not in the tables", file=sys.stderr)
    printed = page.make_tables(runs).strip()
    if printed:
        print(printed)
    print(f"report: {page.write_report(runs, HTML.value)}", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main, positional=True)
