"""Rejection sampling: writes the best of several rollouts per question, by reward, as data for launch/sft.py.

    python launch/sample.py --model=MODEL --config=configs/qwen0p5b_cpu.py --questions=TRAIN --index=DIR \\
        --samples=8 --out=best.jsonl
    python launch/sft.py --config=configs/qwen0p5b_cpu.py --config.model.path=MODEL --transcripts=best.jsonl \\
        --workdir=DIR

The config defines the reward. MODEL is a run directory, a checkpoint, a Hugging Face directory or hub id, or toy.
The same command resumes after the last complete part. With --template, a model that does not know the tags drafts
transcripts (docs/sft.md).
"""

from __future__ import annotations

import dataclasses
import functools

from absl import flags

from psearch_jax.assembly import policy_flags
from psearch_jax.runtime import cli, processes
from psearch_jax.runtime.paths import check_new, on_disk
from psearch_jax.types import UserError

policy_flags.define_flags(None)
QUESTIONS = flags.DEFINE_string(
    "questions",
    None,
    "Question file, prepared directory, tfds:BUILDER:SPLIT, or closed_world for its training questions.",
)
COUNT = flags.DEFINE_integer("count", 0, "Use only this number of questions, from the first on; 0: all.", 0)
SAMPLES = flags.DEFINE_integer("samples", 8, "Rollouts per question.", 1)
TEMPERATURE = policy_flags.temperature_flag(1.0)
flags.adopt_module_key_flags(policy_flags)  # --help lists them
KEEP = flags.DEFINE_integer("keep", 1, "Maximum number of rollouts to keep per question.", 1)
MIN_REWARD = flags.DEFINE_float("min_reward", 1.0, "Minimum reward of a kept rollout.")
SEED = flags.DEFINE_integer("seed", 0, "Sampling seed.", 0, 2**32 - 1)
TEMPLATE = flags.DEFINE_string(
    "template",
    "",
    "Prompt template of these rollouts, instead of the config's: `examples`, for a model that does not know the tags "
    "yet, or a file, in which {answer} stands for the answer. Rollouts that search, and mention the answer only after "
    "a passage did, are then written as transcripts, to be trained on behind the config's prompt.",
)
OUT = flags.DEFINE_string("out", None, "The jsonl file to write.")
cli.process_flags()
cli.finite("min_reward")
cli.require("questions", "out")
NO_EFFECT = {
    "rollout.temperature": "--temperature is the temperature of the rollouts",
    "rollout.samples": "--samples is their number per question",
}


def main(_: list[str]) -> None:
    policy_flags.refuse_without_effect(NO_EFFECT, "these rollouts")
    cli.configure_jax()
    out, model = on_disk(OUT.value, "--out"), policy_flags.model()
    check_new(out, "a new file", "--out=")

    from psearch_jax.assembly import build
    from psearch_jax.assembly.questions import training_questions
    from psearch_jax.config import with_method
    from psearch_jax.data.held_out import without_held_out
    from psearch_jax.data.prepared import open_questions
    from psearch_jax.eval.benchmarks import CLOSED_WORLD
    from psearch_jax.eval.evaluate import FILLS, evaluate, policy_settings, questions_digest
    from psearch_jax.eval.rejection import render_draft, sample
    from psearch_jax.rl.own_terms import load_terms
    from psearch_jax.text.prompts import load_template
    from psearch_jax.text.tags import SEARCH_OPEN
    from psearch_jax.train.checkpointing.settings import hash_texts

    config = policy_flags.config(model)
    in_closed_world = QUESTIONS.value == CLOSED_WORLD
    if in_closed_world:
        config = policy_flags.in_closed_world(config)
    else:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, source=""))
    template = load_template(TEMPLATE.value, draft=True) if TEMPLATE.value else ""
    for refused, found in (
        ("dialect=tool_calls", config.rollout.dialect == "tool_calls" and SEARCH_OPEN in template),
        ("reward.profile=compat", config.reward.profile == "compat"),
        ("rollout.initial_search", config.rollout.initial_search),
    ):
        if template and found:
            raise UserError(f"--template={TEMPLATE.value}: found with {refused}, accepted: without")
    terms = load_terms(config)  # before loading weights
    share = config.data.validation_share
    questions = [] if in_closed_world else without_held_out(open_questions(QUESTIONS.value), share)
    parts = build.from_path(config, model)
    if in_closed_world:
        questions = training_questions(parts.config, parts.world)
    questions = questions[: COUNT.value] if COUNT.value else questions
    if not questions:
        raise UserError(
            f"--questions={QUESTIONS.value}: no question is left after config.data.validation_share={share}, "
            "accepted: at least one"
        )
    weights = parts.sampling_weights()
    retriever = parts.collector.retriever
    passages = processes.broadcast(lambda: retriever.describe() if retriever else {})
    settings = policy_settings(parts.config, parts.tokenizer, parts.params, passages, parts.describe_code()) | {
        "questions": questions_digest(questions),
        "sampling": {"samples": SAMPLES.value, "temperature": TEMPERATURE.value, "seed": SEED.value},
        "selection": {"keep": KEEP.value, "min_reward": MIN_REWARD.value},
        **({"template": hash_texts(template)} if template else {}),
        "reward": dataclasses.asdict(with_method(config).reward) | {"terms": [term.identity for term in terms]},
    }

    collector = parts.collector
    if template:
        collector = dataclasses.replace(collector, render=lambda q: render_draft(collector.dialect, template, q))
    roll_out = functools.partial(
        evaluate,
        collector,
        weights,
        seed=SEED.value,
        step=0,
        temperature=TEMPERATURE.value,
        samples=SAMPLES.value,
    )
    per_part = max(1, FILLS * config.rollout.slots // SAMPLES.value)
    reward = build.make_reward(parts.config, parts.tokenizer, terms)
    options = KEEP.value, MIN_REWARD.value, settings, per_part, bool(template)
    figures = sample(out, questions, roll_out, reward, *options)
    if not processes.first():
        return
    print(
        "{sampled:.0f} rollouts of {questions:.0f} questions: reward {sampled_reward:.3f}, outcome "
        "{sampled_outcome:.3f}, split {sampled_split:.3f}".format(**figures)
    )
    print(
        "{kept:.0f} kept, of {questions_kept:.0f} questions: reward {kept_reward:.3f}, outcome {kept_outcome:.3f}, "
        "split {kept_split:.3f}".format(**figures)
    )
    print(f"{out}: written")


if __name__ == "__main__":
    cli.run(main, defaults=policy_flags.DEFAULTS)
