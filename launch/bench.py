"""Benchmarks a part of the system, compared with a peer in the same run where there is one.

    python launch/bench.py rollout --json=FILE    multi-turn rollouts, compared with transformers on PyTorch
    python launch/bench.py update --json=FILE     an optimizer step, compared with PyTorch
    python launch/bench.py retrieval --json=FILE  vector search and BM25, compared with NumPy, FAISS and bm25s
    python launch/bench.py recall --questions=FILE --corpus=FILE  recall of the retrievers
    python launch/bench.py device --json=FILE     the first four minutes with a GPU or TPU

`python launch/bench.py NAME --help` lists the options of a benchmark. On a shared machine compare only times from the
same run.
"""

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("rollout", "update", "retrieval", "recall", "device")


def main() -> int:
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__.strip())
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        name = repr(sys.argv[1]) if len(sys.argv) > 1 else "nothing"
        print(f"bench: {name} found, accepted: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
    from psearch_jax.types import UserError
    from retrieval.protocol import CorpusError, RetrievalError

    try:
        import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
    except (UserError, CorpusError, RetrievalError, OSError) as error:
        print(f"bench {sys.argv[1]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
