"""Measure a part of the system beside its peers, all in one run.

    python launch/bench.py retrieval --json=FILE  vector search, batching, encoder
    python launch/bench.py recall --questions=FILE --corpus=FILE --json=FILE
    python launch/bench.py corpus --json=FILE     a large corpus opened and read
    python launch/bench.py questions --json=FILE  a large question set prepared and opened
    python launch/bench.py world --json=FILE      what the closed world's questions give away without a policy
    python launch/bench.py triples --triples=FILE what questions made from triples give away
    python launch/bench.py cold_start --json=FILE what a toy policy can before any reinforcement
    python launch/bench.py methods --policy NAME DIR --out=OUT  a policy under every method, and baselines
    python launch/bench.py latency --parallel=RUN what splitting saves by the clock
    python launch/bench.py users --json=FILE      many who ask one server at a time, answered as if alone
    python launch/bench.py weights --json=FILE    what the host holds while a checkpoint of 7B comes and goes
    python launch/bench.py scale --out=DIR        which machine each size needs, planned without one
    python launch/bench.py rollout --json=FILE    multi-turn rollouts beside transformers on PyTorch
    python launch/bench.py update --json=FILE     an optimizer step beside PyTorch, compiled too, and TRL
    python launch/bench.py step --json=FILE       both, and the reference's pass, step after step

`python launch/bench.py SUBJECT --help` lists the options of one. Times on a shared machine mean little by
themselves: compare what one run prints.
"""

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUBJECTS = (
    "retrieval",
    "recall",
    "corpus",
    "questions",
    "scale",
    "weights",
    "rollout",
    "update",
    "step",
    "world",
    "triples",
    "cold_start",
    "methods",
    "latency",
    "users",
)


def main() -> int:
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__.strip())
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in SUBJECTS:
        found = repr(sys.argv[1]) if len(sys.argv) > 1 else "nothing"
        print(f"bench: {found} found, accepted: {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
    from psearch_jax.types import UserError
    from retrieval.protocol import CorpusError, RetrievalError

    try:
        import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
    except (UserError, CorpusError, RetrievalError) as error:
        print(f"bench {sys.argv[1]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
