"""Asks a policy questions and shows its thoughts, parallel searches, retrieved passages and answers.

    python launch/ask.py                                  the toy policy in its closed world, with example questions
    python launch/ask.py "QUESTION" ... --model=RUN|CHECKPOINT|HF_DIR --index=DIR
    python launch/ask.py --model=runs/demo --compare=search_r1    answers each question by a second method, too

Without a question on the command line, questions are read from standard input, one per line. Token budgets, prompt and
retrieval come from --config, or else from the run of the checkpoint, or else are the defaults; --config.SECTION.FIELD
sets one.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from psearch_jax.assembly import policy_flags
from psearch_jax.config import Config
from psearch_jax.runtime import cli, progress
from psearch_jax.runtime.paths import locate, make_writable, write_atomically
from psearch_jax.types import UserError

if TYPE_CHECKING:
    from rich.text import Text

    from psearch_jax.serving.answerer import Answerer
    from psearch_jax.serving.console import AnswerPrinter

ROOT = Path(__file__).resolve().parent.parent
policy_flags.define_flags("toy")
COMPARE = flags.DEFINE_enum("compare", None, policy_flags.METHODS, "A second method that also answers each question.")
TEMPERATURE = policy_flags.temperature_flag(0.0)
flags.adopt_module_key_flags(policy_flags)  # --help lists them
SEED = flags.DEFINE_integer("seed", 0, "Sampling seed; no effect at temperature 0.", 0, 2**32 - 1)
JSON = flags.DEFINE_bool("json", False, "Print only one JSON object per question and method.")
SVG_COLUMNS = 108
SVG = flags.DEFINE_string("svg", None, "Also write the output to this SVG file.")


def main(argv: list[str]) -> None:
    cli.configure_jax()
    for stream in (sys.stdout, sys.stdin):
        stream.reconfigure(errors="replace")
    config = policy_flags.to_serve(ROOT, slots=1)
    if SVG.value:
        if JSON.value:
            raise UserError("--svg, --json: both found, accepted: one of them; --svg draws the text that --json omits")
        make_writable(locate(SVG.value).parent)

    with progress.step("starting"):
        from psearch_jax.serving import console
    answerers, examples = start(config)
    printer, typing = console.AnswerPrinter(sys.stdout), not argv[1:] and sys.stdin.isatty()
    if examples and not typing:
        print(f"the passages cover only a fictional world; an example: {examples[0]}", file=sys.stderr, flush=True)
    asked = failed = 0
    try:
        for question in argv[1:] or (read_typed(examples, printer) if typing else read_lines(examples)):
            asked += 1
            try:
                if not (typing or JSON.value) and (SVG.value or not argv[1:]):
                    printer.line(f"> {question}")
                failed += not ask(question, answerers, printer)
            except UserError as error:  # fails this question only
                print(f"ask: {error}", file=sys.stderr)
                failed += 1
            except KeyboardInterrupt:
                if not typing:
                    raise
                printer.line("stopped")
    except KeyboardInterrupt:
        if not typing:
            raise
        printer.line("stopped")
    finally:
        for answerer in answerers.values():
            answerer.close()
    if SVG.value:
        write_atomically(SVG.value, draw_svg(printer.recorded))
    if not asked and not typing:
        raise UserError("no question: found none on the command line or on standard input, accepted: at least one")
    if failed:
        raise UserError(f"{failed} of {asked} questions could not be answered, see above")


def draw_svg(output: Text) -> str:
    """Terminal output as an SVG, wrapped at SVG_COLUMNS."""
    from rich.console import Console

    terminal = Console(file=io.StringIO(), record=True, width=SVG_COLUMNS)
    terminal.print(output, end="")
    # Without rich's web font, whose host would learn who opens the picture.
    return re.sub(r"@font-face \{.*?\}\s*", "", terminal.export_svg(title="launch/ask.py"), flags=re.DOTALL)


def start(config: Config) -> tuple[dict[str, Answerer], tuple[str, ...]]:
    """The compiled answerers, by method, and example questions."""
    if COMPARE.value == config.method:
        raise UserError(f"--compare={COMPARE.value}: the policy's own method, accepted: another")
    with progress.step("starting"):  # slow imports, after bad input was refused
        from psearch_jax.assembly import build
        from psearch_jax.rollout.collect import for_one
        from psearch_jax.serving.answerer import Answerer

    began = time.monotonic()
    parts = build.from_path(config, policy_flags.model())
    collectors = {config.method: parts.collector}
    if COMPARE.value:
        collectors[COMPARE.value] = build.by_method(parts, config, COMPARE.value)
    examples = policy_flags.examples(parts.world)
    with progress.step("copying the weights layer by layer"):
        weights = parts.sampling_weights()
    del parts  # free the parameters: only their copy is used
    loaded = time.monotonic()
    print("compiling; the next start is faster", file=sys.stderr, flush=True)
    answerers = {}
    for name, collector in collectors.items():
        collector, prompt = for_one(collector)
        collector.warm_up(weights, prompts=(prompt,))
        answerers[name] = Answerer(collector, weights, SEED.value)
    ready = time.monotonic()
    seconds = f"{loaded - began:.1f} s to load, {ready - loaded:.1f} s to compile"
    print(f"ready ({seconds})", file=sys.stderr, flush=True)
    return answerers, examples


def ask(question: str, answerers: Mapping[str, Answerer], printer: AnswerPrinter) -> bool:
    """Asks every method in turn and shows the events. Returns whether every method finished without an error."""
    from psearch_jax.serving.console import AnswerSummary, as_json, describe_time

    results = {}
    for method, answerer in answerers.items():
        result = results[method] = AnswerSummary()
        if len(answerers) > 1 and not JSON.value:
            printer.line(f"{method}:")
        try:
            for event in answerer.answer(question, TEMPERATURE.value, SEED.value):
                result.add(event)
                if not JSON.value:
                    printer.show(event)
        except UserError as error:
            if not JSON.value:
                raise
            print(f"ask: {error}", file=sys.stderr)
            result.error = str(error)  # a line for every question
        if JSON.value:
            print(json.dumps({"method": method, **as_json(question, result)}), flush=True)
        else:
            printer.sum_up(result)
            printer.line("")
    answered = all(result.trajectory for result in results.values())
    for method, result in results.items() if len(results) > 1 and answered and not JSON.value else ():
        printer.line(f"{method}: {result.trajectory.answer}, {describe_time(result)}")
    return answered


def read_lines(examples: Sequence[str]) -> Iterator[str]:
    """Yields the lines of standard input as they arrive; without any, the first example."""
    empty = True
    for line in sys.stdin:
        if line.strip():
            empty = False
            yield line.strip()
    if empty:
        yield from examples[:1]


def read_typed(examples: Sequence[str], printer: AnswerPrinter) -> Iterator[str]:
    """Yields typed lines; an empty line asks the next example."""
    import readline  # noqa: F401 (editing and history)

    printer.line(f"One question per line{', an empty line for the next of these' if examples else ''}; Ctrl-D ends:")
    for example in examples:
        printer.line(f"  {example}")
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
            printer.record(f"> {line}")
            yield line


if __name__ == "__main__":
    cli.run(main, positional=True, defaults=policy_flags.DEFAULTS)
