"""Asks a policy a question, and shows what it thinks, what it searches for at once, what is found, and its answer.

    python launch/ask.py                                  the toy policy in its closed world, with examples to ask
    python launch/ask.py "QUESTION" ... --model=RUN|CHECKPOINT|HF_DIR --index=DIR
    python launch/ask.py --model=runs/demo --beside=search_r1

Without a question they are read from standard input, a line each. Budgets, prompt and retrieval are those of --config,
else of the run that a checkpoint belongs to, else the defaults.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from psearch_jax import launching
from psearch_jax.config import Config, from_mapping, with_method
from psearch_jax.types import UserError

MODEL = flags.DEFINE_string("model", "toy", "Run directory, checkpoint, HF directory or hub id, or toy.")
BEST = flags.DEFINE_bool("best", False, "Of a run directory: the best checkpoint by validation, not the newest.")
CONFIG = config_flags.DEFINE_config_file("config", None, "Budgets, prompt and retrieval of a file in configs/.")
METHOD = flags.DEFINE_enum("method", None, ["parallelsearch", "search_r1", "parallel_prompt", "r1"], "How to search.")
BESIDE = flags.DEFINE_enum(
    "beside", None, ["parallelsearch", "search_r1", "parallel_prompt", "r1"], "Another method to answer each by too."
)
INDEX = flags.DEFINE_string("index", None, "Index directory made by launch/build_index.py.")
CORPUS = flags.DEFINE_string("corpus", None, "A jsonl corpus in place of an index (small ones only).")
URL = flags.DEFINE_string("retriever_url", None, "Server that speaks /retrieve, in place of an index; also several.")
TOPK = flags.DEFINE_integer("topk", None, "Passages per sub-query.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the sampling; without effect at temperature 0.", lower_bound=0)
JSON = flags.DEFINE_bool("json", False, "Print one JSON object per question in place of all else.")
EXAMPLES = 3


def asked_config() -> Config:
    """The config of the flags, for one question at a time."""
    import jax

    from psearch_jax.train.run_config import config_of

    if CONFIG.value is not None:
        config = from_mapping(CONFIG.value.to_dict())
    elif MODEL.value == "toy":
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from configs.smoke import get_config

        config = from_mapping(get_config().to_dict())
    else:
        config = config_of(MODEL.value) or Config()
    given = {"index": INDEX.value, "corpus": CORPUS.value, "url": URL.value}
    retrieval, data = config.retrieval, config.data
    if any(given.values()):
        retrieval = replace(retrieval, **{name: value or "" for name, value in given.items()})
        data = replace(data, source="")
    if TOPK.value:
        retrieval = replace(retrieval, topk=TOPK.value)
    rollout = replace(config.rollout, slots=jax.device_count(), samples=1, widths=1)
    return replace(config, data=data, retrieval=retrieval, rollout=rollout, method=METHOD.value or config.method)


def main(argv: list[str]) -> None:
    launching.configure_jax()
    model = MODEL.value
    if BEST.value:
        from psearch_jax.train.best import find_best

        model = str(find_best(model))
    config = asked_config()
    retrieval = config.retrieval
    places = (config.data.source == "closed_world", retrieval.index, retrieval.corpus, retrieval.url)
    if with_method(config).rollout.search_turns and not any(places):
        raise UserError(
            "--index: none given, accepted: a directory of launch/build_index.py (or --corpus, --retriever_url)"
        )

    from psearch_jax import build  # slow to import: bad input is refused before
    from psearch_jax.serving.answerer import Answerer
    from psearch_jax.serving.console import Shown, Told, as_json, took

    def answerer(method: str) -> Answerer:
        parts = build.from_path(replace(config, method=method), model)
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

    questions = argv[1:]
    examples = []
    if worlds[0] and not questions:
        from psearch_jax.data.asking import questions as drawn

        kinds = ("parallel", "sequential", "parallel")
        examples = [drawn(worlds[0], "eval", kind, 2, i)[i // 2].text for i, kind in enumerate(kinds)]
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


def typed(examples: list[str]):
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
