"""Prints finished runs side by side, or compares evaluations of the same questions.

    python launch/report.py WORKDIR [WORKDIR ...]
    python launch/report.py OUT [OUT ...]

An OUT of launch/eval.py is compared with the first one: differences of EM, turns and tokens, with paired bootstrap
intervals, p by a permutation test, and ratios.
"""

from pathlib import Path

from psearch_jax import launching
from psearch_jax.paths import locate
from psearch_jax.types import UserError


def main(argv: list[str]) -> None:
    if len(argv) < 2:
        raise UserError("no directory found, accepted: one or more of launch/train.py, or of launch/eval.py")
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
        return
    from psearch_jax import report

    runs = [(Path(d).name, report.read_summary(d)) for d in argv[1:]]
    print(report.before_and_after(runs[0][1]) if len(runs) == 1 else report.side_by_side(runs))


if __name__ == "__main__":
    launching.run(main, positional=True)
