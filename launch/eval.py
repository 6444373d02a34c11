"""Evaluates a policy on question files and on the closed world, and prints the published figures beside it.

    python launch/eval.py --model=HF_DIR|CHECKPOINT_DIR --benchmark=NAME:FILE ... --index=DIR --out=DIR
    python launch/eval.py --model=toy --config=configs/smoke.py --benchmark=closed_world --out=DIR

`--benchmark` may be repeated. FILE is a question file, a directory of launch/prepare_data.py, or tfds:BUILDER:SPLIT;
`closed_world:SET` is built in, `closed_world` is all kinds of questions, `NAME:closed_world:SET+SET` draws such
questions for another name. Budgets, prompt and method are those of --config, else of the run that a checkpoint belongs
to, else the defaults. OUT holds results.json, results.md, report.html and one file of rows per benchmark.
With --gold_passages nothing is searched: the passages that state the facts stand in the context, an upper limit for
any retriever.
The same command goes on where a killed one stopped. `launch/report.py OUT OUT` compares two evaluations.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from absl import flags

from psearch_jax import given, launching, processes
from psearch_jax.config import Config, from_mapping, with_method
from psearch_jax.paths import locate, write_whole
from psearch_jax.types import Question, UserError

log = logging.getLogger("psearch_jax")

given.define_flags(None)
BENCHMARK = flags.DEFINE_multi_string("benchmark", [], "NAME:FILE, closed_world or closed_world:SET; repeatable.")
OUT = flags.DEFINE_string("out", None, "The directory to write to.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 1, "Of the sampling; without effect at temperature 0.", 0, 2**32 - 1)
SAMPLES = flags.DEFINE_integer("samples", 1, "Trajectories per question.", lower_bound=1)
K = flags.DEFINE_multi_integer("k", [], "Report pass@k and maj@k, k at most --samples; repeatable.", lower_bound=1)
COUNT = flags.DEFINE_integer("count", 0, "Questions per benchmark; 0: a whole file, 400 per closed-world set.", 0)
COUNT_SEED = flags.DEFINE_integer("count_seed", 1, "Of the draw of --count questions from a file.", 0)
SKIP = flags.DEFINE_bool("skip_bad_rows", False, "Leave bad rows of a file out, and list them in OUT/skipped.txt.")
TRAINING = flags.DEFINE_string("training_data", None, "Questions trained on, to find leaks; default: the run's own.")
GOLD = flags.DEFINE_bool(
    "gold_passages",
    False,
    "No searches: the passages that the questions' metadata name stand in the context from the start.",
)
launching.process_flags()
flags.mark_flag_as_required("out")

# Flags that set one field of the config: flag -> section, type, help.
FIELDS = {
    "slots": ("rollout", int, "rows decoded together"),
    "context_tokens": ("rollout", int, "ids a row can hold"),
    "prompt_tokens": ("rollout", int, "of them, at most this many for the prompt"),
    "turn_tokens": ("rollout", int, "ids sampled per turn"),
    "obs_tokens": ("rollout", int, "ids of one observation"),
    "search_turns": ("rollout", int, "searches; one answer turn follows"),
    "initial_search": ("rollout", bool, "search the question itself before the first turn"),
    "template": ("data", str, "packaged prompt template or a file"),
    "prompt": ("data", str, "template, or row: the prompt that comes with each question"),
    "world_seed": ("data", int, "which closed world"),
    "world_names": ("data", str, "known, or new: names that no cold start has seen"),
    "sampling_dtype": ("model", str, "float32, bfloat16 or float16"),
    "int8_weights": ("model", bool, "sample from kernels of 8 bits, as a run may do in training"),
    "int8_cache": ("model", bool, "with keys and values of 8 bits"),
    "tokenizer": ("model", str, "tokenizer directory, when the model has none beside it"),
}
DEFINE = {int: flags.DEFINE_integer, bool: flags.DEFINE_bool, str: flags.DEFINE_string}
OVERRIDES = {
    name: DEFINE[kind](name, None, f"{section}.{name}: {text}.") for name, (section, kind, text) in FIELDS.items()
}


def with_flags(config: Config) -> Config:
    """The config with every field that a flag of this program names."""
    values = dataclasses.asdict(config)
    for name, flag in OVERRIDES.items():
        if flag.value is not None:
            values[FIELDS[name][0]][name] = flag.value
    if GOLD.value:
        values["rollout"] |= {"initial_search": True, "search_turns": 0}
    return from_mapping(values)


def with_passages(config: Config, closed_world: list[bool]) -> Config:
    """The config with the passages that the benchmarks need: the closed world's own, or those of a named index."""
    retrieval, source, rollout = config.retrieval, "", with_method(config).rollout
    if all(closed_world):
        if given.passages():
            raise UserError(
                "--index, --corpus, --retriever_url: found with the closed world, which brings its own passages"
            )
        retrieval, source = dataclasses.replace(retrieval, index="", corpus="", url=""), "closed_world"
    elif any(closed_world):
        raise UserError("--benchmark: the closed world and files found together, accepted: one of them per call")
    elif not (retrieval.index or retrieval.corpus or retrieval.url) and (
        rollout.search_turns or rollout.initial_search
    ):
        raise UserError("--index: none given, accepted for question files: a directory of launch/build_index.py")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, source=source), retrieval=retrieval)


def check_gold(config: Config, benchmarks: dict[str, list[Question]]) -> None:
    """Raises `UserError` where --gold_passages cannot be followed, before weights are loaded."""
    from psearch_jax.eval.gold import titles_of

    if not with_method(config).rollout.initial_search:
        raise UserError(f"--gold_passages: found with method {config.method}, accepted: a method that reads passages")
    for questions in benchmarks.values():
        for question in questions:
            titles_of(question)


def leaks(benchmarks: dict[str, list[Question]], trained_on: str, held_out: float) -> dict[str, list[str]]:
    """The ids of benchmark questions that were trained on; empty when it is not known what was.

    Args:
      trained_on: where the run's questions are.
      held_out: the share of them that it did not train on.
    """
    from psearch_jax.data.held_out import hold_out
    from psearch_jax.data.prepared import are_there, open_questions, overlap

    if not TRAINING.value and (not trained_on or trained_on == "closed_world" or not are_there(trained_on)):
        return {}
    training = open_questions(TRAINING.value or trained_on)
    if held_out and not TRAINING.value:
        training, _ = hold_out(training, held_out)
    found = overlap([q for questions in benchmarks.values() for q in questions], training)
    places = {id(q) for q in found}
    return {name: [q.id for q in questions if id(q) in places] for name, questions in benchmarks.items()}


def main(_: list[str]) -> None:
    launching.configure_jax()
    model = given.model()
    asked = with_flags(given.config(model))
    if any(k > SAMPLES.value for k in K.value):
        raise UserError(f"--k={max(K.value)}: accepted: at most --samples={SAMPLES.value}")

    from psearch_jax.data.closed_world import ClosedWorld
    from psearch_jax.eval.benchmarks import load_benchmarks

    skipped: list[str] | None = [] if SKIP.value else None
    data = asked.data
    loaded = load_benchmarks(
        BENCHMARK.value,
        lambda: ClosedWorld.make(data.world_seed, names=data.world_names),
        COUNT.value,
        skipped,
        COUNT_SEED.value,
    )
    questions = {benchmark.name: benchmark.questions for benchmark in loaded}
    config = with_passages(asked, [benchmark.closed_world for benchmark in loaded])
    if GOLD.value:
        check_gold(config, questions)
    leaked = leaks(questions, asked.data.source, asked.data.validation_share)

    from tqdm import tqdm

    from psearch_jax import build  # slow to import: bad input is refused before
    from psearch_jax.eval import tables
    from psearch_jax.eval.evaluate import FILLS, Evaluation, evaluate, weights_digest
    from psearch_jax.eval.gold import GoldPassages
    from psearch_jax.eval.scores import figures
    from psearch_jax.report import page
    from psearch_jax.train.validation import EVAL_STEP

    parts = build.from_path(config, model)
    sampling = {"temperature": TEMPERATURE.value, "seed": SEED.value, "samples": SAMPLES.value}
    sections = dataclasses.asdict(with_method(config))
    settings = {"weights": weights_digest(parts.params), "method": config.method, **sampling}
    settings |= {name: sections[name] for name in ("data", "rollout")}
    # Not the addresses: a server may have moved; what decides is the corpus behind it.
    settings["retrieval"] = {name: sections["retrieval"][name] for name in ("index", "corpus", "topk")}
    if GOLD.value:
        asked_of_all = [q for asked in questions.values() for q in asked]
        gold = GoldPassages(parts.collector.retriever, asked_of_all)
        parts = dataclasses.replace(parts, collector=parts.collector.with_retriever(gold))
        settings["gold_passages"] = True
    retriever = parts.collector.retriever
    passages = processes.together(lambda: retriever.describe() if retriever and processes.first() else {})[0]
    settings["retrieval"] |= {name: passages[name] for name in ("corpus_sha256", "rows") if passages}
    settings["sampling_dtype"] = config.model.sampling_dtype
    settings |= {name: True for name in ("int8_weights", "int8_cache") if sections["model"][name]}
    evaluation = Evaluation(OUT.value, questions, settings)
    params = parts.sampling_copy()

    total = sum(map(len, questions.values()))
    bar = tqdm(total=total, unit="question", leave=False, disable=not processes.on_terminal())
    logged = 0

    def progress(done: int, of: int) -> None:
        nonlocal logged
        bar.update(done - bar.n)
        if bar.disable and done * 10 // of > logged:
            logged = done * 10 // of
            log.info("%d of %d questions", done, of)

    def roll_out(asked: Any, tell: Any) -> Any:
        return evaluate(
            parts.collector,
            params,
            asked,
            seed=SEED.value,
            step=EVAL_STEP,  # a checkpoint sampled here draws what its own run drew
            temperature=TEMPERATURE.value,
            samples=SAMPLES.value,
            progress=tell,
        )

    per_part = max(1, FILLS * config.rollout.slots // SAMPLES.value)
    scores = evaluation.run(roll_out, per_part, progress)
    bar.close()
    if not processes.first():
        return

    results = {name: figures(found, sorted(set(K.value))) for name, found in scores.items()}
    text = tables.results(results, config.method)
    if any(benchmark.closed_world for benchmark in loaded):
        notes = ["Published figures (arXiv 2508.09303) are those of the real sets; these questions are fictional."]
    else:
        notes = ["Published figures (arXiv 2508.09303) are those of the whole sets."]
    if passages:
        rows, name, digest = (passages[key] for key in ("rows", "corpus", "corpus_sha256"))
        told = (
            f"{rows} passages, {name or 'made here'} (sha256 {digest})" if digest else "what its server does not tell"
        )
        notes.append(f"Searched: {told}.")
    for name, result in results.items():
        broken = result["all"]["not_finite"]
        if broken:
            notes.append(
                f"NOT FINITE: {broken} of the {len(scores[name])} rollouts of {name} ended in logits that are not "
                f"finite and count as wrong; {config.model.sampling_dtype} is too narrow for this model."
            )
    for name, ids in leaked.items():
        if ids:
            notes.append(f"LEAK: {len(ids)} of the {len(questions[name])} questions of {name} were trained on.")
    if skipped:
        notes.append(f"{len(skipped)} bad rows were left out, see skipped.txt; the first: {skipped[0]}")
        write_whole(locate(OUT.value) / "skipped.txt", "".join(f"{line}\n" for line in skipped))
    text = "\n\n".join([text, *notes]) + "\n"
    evaluation.finish({"model": model, "passages": passages, "benchmarks": results, "leaked": leaked}, text)
    print(text, end="")
    page.offer_report(OUT.value)


if __name__ == "__main__":
    launching.run(main)
