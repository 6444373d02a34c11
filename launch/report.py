"""Prints finished runs side by side: `python launch/report.py WORKDIR [WORKDIR ...]`."""

from pathlib import Path

from psearch_jax import launching
from psearch_jax.types import UserError


def main(argv: list[str]) -> None:
    from psearch_jax import report

    if len(argv) < 2:
        raise UserError("no run directory found, accepted: one or more")
    runs = [(Path(d).name, report.read_summary(d)) for d in argv[1:]]
    print(report.before_and_after(runs[0][1]) if len(runs) == 1 else report.side_by_side(runs))


if __name__ == "__main__":
    launching.run(main, positional=True)
