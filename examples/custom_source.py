"""Questions from code of your own, here from a table of names and years.

    python launch/train.py --config=configs/qwen0p5b_cpu.py --config.model.path=MODEL \\
        --config.data.source=examples/custom_source.py:questions --config.retrieval.corpus=data/corpus.jsonl \\
        --workdir=runs/mine

`launch/prepare_data.py --source=NAME:examples/custom_source.py:questions` writes them to a directory. The keys of a
row are those of a question file (docs/data.md).
"""

from collections.abc import Iterator
from itertools import combinations

BORN = {"Ada Lovelace": 1815, "Alan Turing": 1912, "Emmy Noether": 1882, "Grace Hopper": 1906}


def questions() -> Iterator[dict]:
    """One row for each pair of names."""
    for first, second in combinations(BORN, 2):
        earlier = min(first, second, key=BORN.__getitem__)
        question = f"Who was born first, {first} or {second}?"
        yield {"id": question, "question": question, "golden_answers": [earlier], "metadata": {"type": "parallel"}}
