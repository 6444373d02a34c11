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

from psearch_jax import given, launching
from psearch_jax.limits import HOTTEST
from psearch_jax.paths import locate, make_writable, write_whole
from psearch_jax.types import UserError

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
    config = replace(config, rollout=replace(config.rollout, widths=1))  # nothing is compiled twice for one question

    if SVG.value:
        if JSON.value:
            raise UserError("--svg draws what is shown, and --json shows nothing")
        make_writable(locate(SVG.value).parent)

    from psearch_jax import build  # slow to import: bad input is refused before
    from psearch_jax.serving import recording
    from psearch_jax.serving.answerer import Answerer
    from psearch_jax.serving.console import Shown, Told, as_json, took

    parts = build.from_path(config, given.model())
    params, world, collectors = parts.sampling_copy(), parts.world, {config.method: parts.collector}
    if BESIDE.value not in (None, config.method):
        collectors[BESIDE.value] = build.by_method(parts, BESIDE.value)
    del parts  # the parameters are not needed beside their copy
    print("compiling; the next start is quicker", file=sys.stderr, flush=True)
    for collector in collectors.values():
        collector.warm_up(params)
    answerers = {name: Answerer(collector, params, SEED.value) for name, collector in collectors.items()}
    shown, failed = Shown(sys.stdout), 0

    def ask(question: str) -> bool:
        """Whether it was answered by every method, rightly or not."""
        told_by = {}
        for method, own in answerers.items():
            told = told_by[method] = Told()
            if len(answerers) > 1 and not JSON.value:
                shown.line(f"{method}:")
            for event in own.answer(question, TEMPERATURE.value, SEED.value):
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

    given_here, typing = argv[1:], sys.stdin.isatty()
    examples = given.examples(world)
    if not given_here and typing:
        shown.line(f"A question a line{', an empty one for the next of these' if world else ''}, Ctrl-D ends:")
        for example in examples:
            shown.line(f"  {example}")
    asked = 0
    try:
        for question in given_here or (typed(examples) if typing else lines(examples)):
            if typing and not given_here:
                shown.record(f"> {question}")
            elif not JSON.value and (SVG.value or not given_here):
                shown.line(f"> {question}")
            asked += 1
            try:
                failed += not ask(question)
            except UserError as error:  # of one question among several
                print(f"ask: {error}", file=sys.stderr)
                failed += 1
            except KeyboardInterrupt:
                if given_here or not typing:
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


def lines(examples: Sequence[str]) -> Iterator[str]:
    """The lines of standard input, each as soon as it is there; without any, the first example."""
    found = False
    for line in sys.stdin:
        if line.strip():
            found = True
            yield line.strip()
    if not found:
        yield from examples[:1]


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
