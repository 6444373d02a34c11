"""A dialect of your own; here the tags, with one query per line instead of `##`.

    python launch/train.py --config=configs/qwen0p5b_cpu.py --config.model.path=MODEL \\
        --config.rollout.dialect=examples/custom_dialect.py:Lines --config.data.source=data/questions.jsonl \\
        --config.retrieval.corpus=data/corpus.jsonl --config.data.template=PROMPT.txt --workdir=runs/lines

The prompt template must explain it. `psearch_jax.text.dialects.Dialect` lists what a dialect defines: where a row
stops, how a turn is parsed, and what follows it.
"""

from collections.abc import Sequence
from dataclasses import replace

from psearch_jax.text.dialects import Tags
from psearch_jax.text.tags import SEARCH_CLOSE, SEARCH_OPEN, Action
from psearch_jax.types import Call


class Lines(Tags):
    """`<search>`, one query per line, `</search>`."""

    def parse(self, text: str, tail_start: int | None = None, ended: bool = True) -> Action:
        action = super().parse(text, tail_start, ended)
        if action.kind != "search":
            return action
        searched = text.partition(SEARCH_CLOSE)[0].rpartition(SEARCH_OPEN)[2]
        queries = dict.fromkeys(" ".join(line.split()) for line in searched.splitlines() if line.strip())
        return replace(action, queries=tuple(queries)[: self.max_calls])

    def write_calls(self, calls: Sequence[Call]) -> str:
        return "\n".join([SEARCH_OPEN, *(call.text for call in calls), SEARCH_CLOSE])
