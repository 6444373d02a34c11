"""Asks a policy a question, and shows what it thinks, what it searches for at once, what is found, and its answer.

    python launch/ask.py                                  the toy policy in its closed world, with examples to ask
    python launch/ask.py "QUESTION" ... --model=RUN|CHECKPOINT|HF_DIR --index=DIR
    python launch/ask.py --model=runs/demo --beside=search_r1

Without a question they are read from standard input, a line each. Budgets, prompt and retrieval are those of --config,
else of the run that a checkpoint belongs to, else the defaults.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from psearch_jax import given, launching, progress
from psearch_jax.config import Config
from psearch_jax.limits import HOTTEST
from psearch_jax.paths import locate, make_writable, write_whole
from psearch_jax.types import UserError

if TYPE_CHECKING:
    from psearch_jax.serving.answerer import Answerer
    from psearch_jax.serving.console import Shown

ROOT = Path(__file__).resolve().parent.parent
given.define_flags("toy")
BESIDE = flags.DEFINE_enum("beside", None, given.METHODS, "Another method to answer each question by, too.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", 0.0, HOTTEST)
SEED = flags.DEFINE_integer("seed", 0, "Of the sampling; without effect at temperature 0.", 0, 2**32 - 1)
JSON = flags.DEFINE_bool("json", False, "Print one JSON object per question in place of all else.")
SVG = flags.DEFINE_string("svg", None, "Draw what was shown as a picture that plays line by line in a page.")


def main(argv: list[str]) -> None:
    launching.configure_jax()
    for stream in (sys.stdout, sys.stdin):
        stream.reconfigure(errors="replace")
    config = given.to_serve(ROOT, slots=1)
    if SVG.value:
        if JSON.value:
            raise UserError("--svg draws what is shown, and --json shows nothing")
        make_writable(locate(SVG.value).parent)

    with progress.step("starting"):
        from psearch_jax.serving import console, recording
    answerers, examples = start(config)
    shown, typing = console.Shown(sys.stdout), not argv[1:] and sys.stdin.isatty()
    if examples and not typing:
        print(f"the passages are of an invented world only; one may ask: {examples[0]}", file=sys.stderr, flush=True)
    asked = failed = 0
    try:
        for question in argv[1:] or (typed(examples, shown) if typing else lines(examples)):
            asked += 1
            try:
                if not (typing or JSON.value) and (SVG.value or not argv[1:]):
                    shown.line(f"> {question}")
                failed += not ask(question, answerers, shown)
            except UserError as error:  # of one question among several
                print(f"ask: {error}", file=sys.stderr)
                failed += 1
            except KeyboardInterrupt:
                if not typing:
                    raise
                shown.line("stopped")
    except KeyboardInterrupt:
        shown.line("stopped")
    finally:
        for answerer in answerers.values():
            answerer.close()
    if SVG.value:
        write_whole(SVG.value, recording.svg(shown.recorded, "launch/ask.py"))
    if not asked and not typing:
        raise UserError("no question: found none on the command line or on standard input, accepted: at least one")
    if failed:
        raise UserError(f"{failed} of {asked} questions could not be answered, see above")


def start(config: Config) -> tuple[dict[str, Answerer], tuple[str, ...]]:
    """Who answers, by method, compiled and ready; and examples of what to ask."""
    with progress.step("starting"):  # slow to import: bad input is refused before
        from psearch_jax import build
        from psearch_jax.rollout.collect import for_one
        from psearch_jax.serving.answerer import Answerer

    began = time.monotonic()
    parts = build.from_path(config, given.model())
    params, collectors = parts.sampling_copy(), {config.method: parts.collector}
    if BESIDE.value not in (None, config.method):
        collectors[BESIDE.value] = build.by_method(parts, config, BESIDE.value)
    examples = given.examples(parts.world)
    del parts  # the parameters are not needed beside their copy
    sampler = collectors[config.method].sampler
    with progress.step("copying the weights layer by layer"):
        apart = sampler.take_apart(params)
    loaded = time.monotonic()
    print("compiling; the next start is quicker", file=sys.stderr, flush=True)
    answerers = {}
    for name, collector in collectors.items():
        collector, prompt = for_one(collector)
        collector.compile(params, (prompt,), apart)
        answerers[name] = Answerer(collector, params, SEED.value, apart=apart)
    ready = time.monotonic()
    seconds = f"{loaded - began:.1f} s to load, {ready - loaded:.1f} s to compile"
    print(f"ready ({seconds})", file=sys.stderr, flush=True)
    return answerers, examples


def ask(question: str, answerers: Mapping[str, Answerer], shown: Shown) -> bool:
    """Asks every method in turn, and shows what comes. Whether all of them answered, rightly or not."""
    from psearch_jax.serving.console import Told, as_json, took

    told_by = {}
    for method, answerer in answerers.items():
        told = told_by[method] = Told()
        if len(answerers) > 1 and not JSON.value:
            shown.line(f"{method}:")
        for event in answerer.answer(question, TEMPERATURE.value, SEED.value):
            told.add(event)
            if not JSON.value:
                shown.show(event)
        if JSON.value:
            print(json.dumps({"method": method, **as_json(question, told)}), flush=True)
        else:
            shown.sum_up(told)
            shown.line("")
    answered = all(told.trajectory for told in told_by.values())
    for method, told in told_by.items() if len(told_by) > 1 and answered and not JSON.value else ():
        shown.line(f"{method}: {told.trajectory.answer}, {took(told)}")
    return answered


def lines(examples: Sequence[str]) -> Iterator[str]:
    """The lines of standard input, each as soon as it is there; without any, the first example."""
    found = False
    for line in sys.stdin:
        if line.strip():
            found = True
            yield line.strip()
    if not found:
        yield from examples[:1]


def typed(examples: Sequence[str], shown: Shown) -> Iterator[str]:
    """What is typed, line by line; an empty line stands for the next example."""
    import readline  # noqa: F401 (editing and history)

    shown.line(f"A question a line{', an empty one for the next of these' if examples else ''}, Ctrl-D ends:")
    for example in examples:
        shown.line(f"  {example}")
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
            shown.record(f"> {line}")
            yield line


if __name__ == "__main__":
    launching.run(main, positional=True)
