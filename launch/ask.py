"""Asks a policy a question, and shows what it thinks, what it searches for at once, what is found, and its answer.

    python launch/ask.py                                  the toy policy in its closed world, with examples to ask
    python launch/ask.py "QUESTION" ... --model=RUN|CHECKPOINT|HF_DIR --index=DIR
    python launch/ask.py --model=runs/demo --beside=search_r1

Without a question they are read from standard input, a line each. Budgets, prompt and retrieval are those of --config,
else of the run that a checkpoint belongs to, else the defaults.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from psearch_jax import launching
from psearch_jax.serving import given

ROOT = Path(__file__).resolve().parent.parent
given.define_flags()
BESIDE = flags.DEFINE_enum("beside", None, given.METHODS, "Another method to answer each question by, too.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the sampling; without effect at temperature 0.", lower_bound=0)
JSON = flags.DEFINE_bool("json", False, "Print one JSON object per question in place of all else.")


def main(argv: list[str]) -> None:
    launching.configure_jax()
    config = given.config(ROOT, slots=1)
    config = replace(config, rollout=replace(config.rollout, widths=1))  # nothing is compiled twice for one question

    from psearch_jax import build  # slow to import: bad input is refused before
    from psearch_jax.serving.answerer import Answerer
    from psearch_jax.serving.console import Shown, Told, as_json, took

    def answerer(method: str) -> Answerer:
        parts = build.from_path(replace(config, method=method), given.model())
        worlds.append(parts.world)
        return Answerer(parts.collector, parts.sampling_copy(), SEED.value)

    worlds: list = []
    methods = [config.method, *([BESIDE.value] if BESIDE.value not in (None, config.method) else [])]
    answerers = {method: answerer(method) for method in methods}
    shown = Shown(sys.stdout)

    def ask(question: str) -> None:
        took_by = []
        for method, own in answerers.items():
            told = Told()
            if len(answerers) > 1 and not JSON.value:
                shown.line(f"{method}:")
            for event in own.answer(question, TEMPERATURE.value, SEED.value):
                told.add(event)
                if not JSON.value:
                    shown.show(event)
            if JSON.value:
                print(json.dumps({"method": method, **as_json(question, told)}, ensure_ascii=False), flush=True)
            else:
                shown.sum_up(told)
                shown.line("")
            took_by.append((method, told))
        if len(answerers) > 1 and not JSON.value and all(told.trajectory for _, told in took_by):
            for method, told in took_by:
                shown.line(f"{method}: {told.trajectory.answer}, {took(told)}")

    questions: Iterator[str] | Sequence[str] = argv[1:]
    examples = () if questions else given.examples(worlds[0])
    if not questions and sys.stdin.isatty():
        shown.line("A question a line, an empty one for the next of these, Ctrl-D ends:")
        for example in examples:
            shown.line(f"  {example}")
        questions = typed(examples)
    elif not questions:
        questions = [line.strip() for line in sys.stdin if line.strip()] or examples[:1]
    for question in questions:
        if not sys.stdin.isatty() and not argv[1:] and not JSON.value:
            shown.line(f"> {question}")
        ask(question)


def typed(examples: Sequence[str]) -> Iterator[str]:
    """What is typed, line by line; an empty line stands for the next example."""
    import readline  # noqa: F401 (editing and history)

    ahead = list(examples)
    while True:
        try:
            line = input("\nquestion> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line and ahead:
            line = ahead.pop(0)
            print(line)
        if line:
            yield line


if __name__ == "__main__":
    launching.run(main, positional=True)
