"""Evaluates a policy on question files or on the closed world, and prints the results next to published figures.

    python launch/eval.py --model=HF_DIR|CHECKPOINT_DIR --benchmark=NAME:FILE ... --index=DIR --out=OUT
    python launch/eval.py --model=toy --config=configs/smoke.py --benchmark=closed_world --out=OUT

`--benchmark` may be repeated. FILE is a question file, a directory made by launch/prepare_data.py, or
tfds:BUILDER:SPLIT. `closed_world:SET` is a built-in set, `closed_world:SET+SET` several as one benchmark, and
`closed_world` one benchmark per kind of question. Token budgets, prompt and method come from --config, or else from
the run of the checkpoint, or else are the defaults; --config.SECTION.FIELD sets one. OUT gets results.json,
results.md, report.html and one file of rows per benchmark.
With --gold_passages the policy does not search: its context starts with the passages that state the facts, which gives
an upper limit for any retriever if the policy can read passages that it did not search for.
After a kill the same command resumes. `launch/report.py OUT OUT` compares two evaluations.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

from absl import flags

from psearch_jax.assembly import policy_flags
from psearch_jax.config import Config, with_method
from psearch_jax.runtime import cli, processes
from psearch_jax.runtime.paths import locate, write_atomically
from psearch_jax.types import END_STATUSES, Question, UserError

if TYPE_CHECKING:
    from psearch_jax.eval.scores import Score

log = logging.getLogger("psearch_jax")

policy_flags.define_flags(None)
BENCHMARK = flags.DEFINE_multi_string("benchmark", [], "NAME:FILE, closed_world or closed_world:SET; repeatable.")
OUT = flags.DEFINE_string("out", None, "The directory to write to.")
TEMPERATURE = policy_flags.temperature_flag(0.0)
flags.adopt_module_key_flags(policy_flags)  # --help lists them
SEED = flags.DEFINE_integer("seed", 1, "Sampling seed; no effect at temperature 0.", 0, 2**32 - 1)
SAMPLES = flags.DEFINE_integer("samples", 1, "Trajectories per question.", lower_bound=1)
K = flags.DEFINE_multi_integer("k", [], "Report pass@k, k at most --samples; repeatable.", lower_bound=1)
COUNT = flags.DEFINE_integer("count", 0, "Questions per benchmark; 0: the complete file, 400 per closed-world set.", 0)
SKIP = flags.DEFINE_bool("skip_bad_rows", False, "Skip bad rows of a file and list them in OUT/skipped.txt.")
TRAINING = flags.DEFINE_string(
    "training_data", None, "Training questions, to report benchmark questions among them; default: the run's."
)
GOLD = flags.DEFINE_bool(
    "gold_passages",
    False,
    "Do not search: put the passages named in the questions' metadata into the context.",
)
cli.process_flags()
cli.require("out")
NO_EFFECT = {
    "seed": "--seed is the seed of an evaluation",
    "eval.temperature": "--temperature is its temperature",
    "rollout.temperature": "--temperature is its temperature",
    "rollout.samples": "--samples is the number of rollouts per question",
}


def use_gold_passages(config: Config) -> Config:
    """The config with which a policy answers from gold passages: they start its context, and it does not search."""
    return dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, initial_search=True, search_turns=0)
    )


def use_passages(config: Config, closed_world: list[bool]) -> Config:
    """The config with the passages that the benchmarks need: the closed world's, or an index, corpus or URL."""
    if all(closed_world):
        return policy_flags.in_closed_world(config)
    if any(closed_world):
        raise UserError("--benchmark: the closed world and files found together, accepted: one of them per call")
    rollout = with_method(config).rollout
    if not config.retrieval.passages and (rollout.search_turns or rollout.initial_search):
        raise UserError("--index: none given, accepted for question files: a directory of launch/build_index.py")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, source=""))


def check_gold(config: Config, benchmarks: dict[str, list[Question]]) -> None:
    """Raises `UserError` if --gold_passages does not fit the method or the questions."""
    from psearch_jax.eval.gold import needed_passages

    if not with_method(config).rollout.initial_search:
        raise UserError(f"--gold_passages: found with method {config.method}, accepted: a method that reads passages")
    for questions in benchmarks.values():
        for question in questions:
            needed_passages(question)


def find_leaks(
    benchmarks: dict[str, list[Question]], trained_on: str, held_out: float
) -> tuple[dict[str, list[str]], str]:
    """The ids of benchmark questions that are training questions, or {} and why that is not checked.

    Args:
      trained_on: location of the run's questions.
      held_out: share of them held out from training.
    """
    from psearch_jax.data.held_out import without_held_out
    from psearch_jax.data.prepared import TFDS_PREFIX, find_overlap, is_own_code, location_exists, open_questions

    if TRAINING.value:
        training = open_questions(TRAINING.value)
    elif trained_on == "closed_world":
        return {}, ""
    elif not trained_on:
        return {}, "--model names no training questions; --training_data does"
    elif trained_on.startswith(TFDS_PREFIX):
        return {}, f"a TFDS set is not downloaded for this; --training_data={trained_on} does so"
    elif is_own_code(trained_on):
        return {}, f"code is not run for this; --training_data={trained_on} does so"
    elif not location_exists(trained_on):
        return {}, f"{trained_on} not found; see --training_data"
    else:
        training = without_held_out(open_questions(trained_on), held_out)
    overlapping = {id(q) for q in find_overlap([q for questions in benchmarks.values() for q in questions], training)}
    return {name: [q.id for q in questions if id(q) in overlapping] for name, questions in benchmarks.items()}, ""


def describe_evaluation(
    scores: dict[str, list[Score]], config: Config, passages: dict[str, Any], closed_world: bool
) -> list[str]:
    """What a reader of the tables has to know: where the passages are from, and what went wrong in most rollouts."""
    if closed_world:
        notes = ["Published figures are for the real sets; these questions are fictional."]
    else:
        notes = ["Published figures, where shown, are for the complete sets, with various retrievers."]
    if passages:
        rows, name, digest = (passages[key] for key in ("rows", "corpus", "corpus_sha256"))
        known = f"{rows} passages, {name or 'generated'} (sha256 {digest})"
        notes.append(f"Searched: {known if digest else 'not reported by the server'}.")
    for name, rollouts in scores.items():
        share = {status: sum(s.status == status for s in rollouts) / len(rollouts) for status in END_STATUSES}
        if share["not_finite"]:
            notes.append(
                f"NOT FINITE: {share['not_finite']:.1%} of the rollouts of {name} ended with logits that are not "
                f"finite and count as wrong; {config.model.sampling_dtype} is too narrow for this model."
            )
        if share["answered"] < 0.5:
            notes.append(f"NO ANSWER: {1 - share['answered']:.0%} of the rollouts of {name} end without one.")
        idle = sum(s.first_sub_queries == 0 for s in rollouts) / len(rollouts)
        if idle > 0.5 and with_method(config).rollout.search_turns:
            notes.append(
                f"NO SEARCH: {idle:.0%} of the rollouts of {name} never search, which counts as a wrong decision."
            )
    return notes


def main(_: list[str]) -> None:
    policy_flags.refuse_without_effect(NO_EFFECT, "evaluations")
    cli.configure_jax()
    model = policy_flags.model()
    base = policy_flags.config(model)
    if GOLD.value:
        base = use_gold_passages(base)
    if any(k > SAMPLES.value for k in K.value):
        raise UserError(f"--k={max(K.value)}: accepted: at most --samples={SAMPLES.value}")

    from psearch_jax.closed_world.encyclopedia import ClosedWorld
    from psearch_jax.eval.benchmarks import load_benchmarks
    from psearch_jax.train.checkpointing.run_config import load_run_config

    skipped: list[str] | None = [] if SKIP.value else None
    data = base.data
    loaded = load_benchmarks(
        BENCHMARK.value,
        lambda: ClosedWorld.make(data.world_seed, names=data.world_names),
        COUNT.value,
        skipped,
    )
    questions = {benchmark.name: benchmark.questions for benchmark in loaded}
    config = use_passages(base, [benchmark.closed_world for benchmark in loaded])
    if GOLD.value:
        check_gold(config, questions)
    run = load_run_config(model)  # which --config replaces
    trained = run.data if run and run.data.source else data
    leaked, unchecked = find_leaks(questions, trained.source, trained.validation_share)

    from psearch_jax.assembly import build  # slow import, after bad input was refused
    from psearch_jax.eval import tables
    from psearch_jax.eval.evaluate import FILLS, evaluate, evaluate_benchmarks, policy_settings, write_results
    from psearch_jax.eval.gold import GoldPassages
    from psearch_jax.eval.scores import figures
    from psearch_jax.report import page
    from psearch_jax.train.monitoring.validation import EVAL_STEP

    parts = build.from_path(config, model)
    sampling = {"temperature": TEMPERATURE.value, "seed": SEED.value, "samples": SAMPLES.value}
    if GOLD.value:
        gold = GoldPassages(parts.collector.retriever, [q for group in questions.values() for q in group])
        parts = dataclasses.replace(parts, collector=dataclasses.replace(parts.collector, retriever=gold))
        sampling["gold_passages"] = True
    retriever = parts.collector.retriever
    passages = processes.broadcast(lambda: retriever.describe() if retriever else {})
    settings = policy_settings(parts.config, parts.tokenizer, parts.params, passages, parts.describe_code())
    weights = parts.sampling_weights()

    roll_out = functools.partial(
        evaluate,
        parts.collector,
        weights,
        seed=SEED.value,
        step=EVAL_STEP,  # as in the run's own evaluations, so that a checkpoint samples the same tokens here
        temperature=TEMPERATURE.value,
        samples=SAMPLES.value,
    )
    per_part = max(1, FILLS * config.rollout.slots // SAMPLES.value)
    scores = evaluate_benchmarks(OUT.value, questions, settings | sampling, roll_out, per_part)
    if not processes.first():
        return

    results = {name: figures(rows, sorted(set(K.value))) for name, rows in scores.items()}
    text = tables.results(results, config.method)
    notes = describe_evaluation(scores, config, passages, loaded[0].closed_world)
    for name, ids in leaked.items():
        if ids:
            notes.append(f"LEAK: {len(ids)} of the {len(questions[name])} questions of {name} were trained on.")
    if skipped:
        notes.append(f"{len(skipped)} bad rows were skipped, see skipped.txt; the first: {skipped[0]}")
        write_atomically(locate(OUT.value) / "skipped.txt", "".join(f"{line}\n" for line in skipped))
    text = "\n\n".join([text, *notes]) + "\n"
    write_results(OUT.value, {"model": model, "passages": passages, "benchmarks": results, "leaked": leaked}, text)
    print(text, end="")
    if unchecked:
        log.info("leaks are not checked: %s", unchecked)
    page.offer_report(OUT.value)


if __name__ == "__main__":
    cli.run(main, defaults=policy_flags.DEFAULTS)
