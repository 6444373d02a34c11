"""Benchmarks a part of the system, with its peers in the same run where there are any.

    python launch/bench.py retrieval --json=FILE  vector search, batching and encoder speed
    python launch/bench.py recall --questions=FILE --corpus=FILE --json=FILE  recall of the retrievers
    python launch/bench.py merging --questions=FILE --index=DIR --tokenizer=DIR  facts that an observation shows
    python launch/bench.py corpus --json=FILE     opening and reading a large corpus
    python launch/bench.py questions --json=FILE  preparing and opening a large question set
    python launch/bench.py world --json=FILE      what closed-world questions reveal without a policy
    python launch/bench.py triples --triples=FILE what questions made from triples reveal
    python launch/bench.py cold_start --json=FILE skills of a toy policy before reinforcement learning
    python launch/bench.py stale_cache --run RUN  what keeping the cache of suspended rollouts would cost
    python launch/bench.py transplant --model RUN whether a policy splits by the question or by its first thought
    python launch/bench.py methods --policy NAME DIR --out=OUT  policies under every method, and baselines
    python launch/bench.py device --out=DIR       the first hour with a GPU or TPU: kernels, rates, rollouts, updates
    python launch/bench.py drafts --model=DIR --questions=FILE --index=DIR  rollouts with and without draft tokens
    python launch/bench.py latency --parallel=RUN wall-clock time that splitting a question saves
    python launch/bench.py users --json=FILE      many concurrent users of one server
    python launch/bench.py weights --json=FILE    host memory while a 7B checkpoint is loaded and exported
    python launch/bench.py scale --out=DIR        the machine that each model size needs, planned without one
    python launch/bench.py staleness --rollouts=RUN  what rollouts ahead of the updates would save, simulated
    python launch/bench.py rollout --json=FILE    multi-turn rollouts, next to transformers on PyTorch
    python launch/bench.py update --json=FILE     an optimizer step, next to PyTorch, torch.compile and TRL
    python launch/bench.py step --json=FILE       complete training steps: rollouts, reference pass and update

`python launch/bench.py SUBJECT --help` lists the options of a benchmark. On a shared machine compare only times from
the same run.
"""

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {  # the folders of benchmarks/
    "speed": ("device", "drafts", "latency", "rollout", "scale", "staleness", "step", "update", "users", "weights"),
    "search": ("corpus", "merging", "recall", "retrieval"),
    "quality": ("cold_start", "methods", "questions", "stale_cache", "transplant", "triples", "world"),
}
SUBJECTS = {subject: group for group, subjects in GROUPS.items() for subject in subjects}


def main() -> int:
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__.strip())
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in SUBJECTS:
        subject = repr(sys.argv[1]) if len(sys.argv) > 1 else "nothing"
        print(f"bench: {subject} found, accepted: {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
    from psearch_jax.types import UserError
    from retrieval.protocol import CorpusError, RetrievalError

    try:
        import_module(f"benchmarks.{SUBJECTS[sys.argv[1]]}.{sys.argv[1]}").main(sys.argv[2:])
    except (UserError, CorpusError, RetrievalError) as error:
        print(f"bench {sys.argv[1]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
