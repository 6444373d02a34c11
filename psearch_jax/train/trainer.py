"""The main loop: collect, reward, update, log, save; with an evaluation before the first step and after the last.

A run directory holds config.json, metrics.jsonl, tensorboard/, trajectories/, checkpoints/, best/, summary.json.
Several processes share one: all save and restore the checkpoints, the first one writes the rest.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from tqdm import tqdm

from psearch_jax import processes
from psearch_jax.config import Config, best_metric, to_mapping
from psearch_jax.data.loader import QuestionLoader
from psearch_jax.eval.evaluate import evaluate, questions_digest, trajectory_row
from psearch_jax.eval.scores import by_kind, score, summarise
from psearch_jax.metrics import MetricsWriter, cut_jsonl, mean
from psearch_jax.paths import locate, make_writable, write_whole
from psearch_jax.rl.advantages import group_advantages
from psearch_jax.rl.batch import make_batch, mini_batches
from psearch_jax.rollout.collect import Collector
from psearch_jax.text.answers import exact_match, normalise
from psearch_jax.train.best import Best
from psearch_jax.train.checkpoint import Checkpoints, model_record
from psearch_jax.train.state import TrainState
from psearch_jax.train.step import Learner
from psearch_jax.types import END_STATUSES, KINDS, Question, RewardParts, Trajectory, UserError
from retrieval.protocol import RetrievalError

log = logging.getLogger("psearch_jax")
EVAL_STEP = 2**31 - 1  # the step in the keys of every evaluation: before and after draw the same numbers


@dataclass
class Run:
    """The live parts of a training run, made by build.py."""

    config: Config  # as the method has it
    collector: Collector
    learner: Learner
    loader: QuestionLoader
    evaluation: Sequence[Question]
    reward: Callable[[Trajectory], RewardParts]
    state: TrainState
    model: Any  # Qwen2Config
    tokenizer_path: str
    given: Config  # as the user has it: what config.json records
    reference: nnx.State | None = None  # None when the KL coefficient is 0
    lora: dict[str, Any] | None = None  # what a checkpoint of adapters says about the weights beside them
    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stop_requested: bool = False  # SIGTERM has arrived


class Interrupted(Exception):
    """SIGTERM arrived; everything is saved."""


def train(run: Run, workdir: str | Path) -> dict[str, Any]:
    """Runs until `train.steps`, from wherever the workdir stands, and returns the summary it wrote.

    Raises:
      Interrupted: after SIGTERM, once the checkpoint is on disk.
      RetrievalError: the retriever is gone for good, once the last whole step is on disk.
      UserError: too many updates in a row were not finite, or the run directory cannot be written.
    """
    try:
        with ExitStack() as closers:
            return _train(run, locate(workdir), closers)
    except OSError as error:
        if processes.lost(error):
            raise
        raise UserError(
            f"{error.filename or workdir}: cannot be written ({error.strerror or error}); the checkpoints of "
            f"{workdir} are whole, and the same command goes on from the newest"
        ) from error


def _train(run: Run, workdir: Path, closers: ExitStack) -> dict[str, Any]:
    config = run.config
    make_writable(workdir)  # a directory that takes no files is met here, not at the first save
    started = time.monotonic()

    # ---- resume ----
    checkpoints = Checkpoints(workdir / "checkpoints", config.train.keep_checkpoints, config.train.keep_every_steps)
    closers.enter_context(closing(checkpoints))
    step, found = 0, checkpoints.restore(run.state)
    if found:
        run.state, loop = found
        step = int(loop["step"])
        run.loader.restore(loop["loader"])
        log.info("resuming behind step %d", step)
    if processes.first():
        _write_json(workdir / "config.json", to_mapping(run.given))
        cut_jsonl(workdir / "metrics.jsonl", step)
        for file in (workdir / "trajectories").glob("*.jsonl"):
            if int(file.stem) >= step:
                file.unlink()
    writer = closers.enter_context(closing(MetricsWriter(workdir)))
    signal.signal(signal.SIGTERM, lambda *_: setattr(run, "stop_requested", True))

    # ---- evaluate before ----
    with _phase(run, "compile"):
        sampling = run.learner.sampling_copy(run.state.params)
        run.collector.warm_up(sampling)
        del sampling
        run.learner.warm_up(run.state.params, run.reference)
    before = _evaluate_once(run, workdir / "before.json", fresh=step == 0)

    # ---- steps ----
    record = {"model": model_record(run.model), "tokenizer": run.tokenizer_path}
    record |= {"lora": run.lora} if run.lora else {}
    best = None
    if config.eval.every_steps:
        best = closers.enter_context(closing(Best(workdir, config.eval.best_metric, questions_digest(run.evaluation))))

    def save(step: int, loader: dict[str, Any]) -> None:
        with _phase(run, "checkpoint"):
            processes.together(writer.flush)
            checkpoints.save(step, run.state, {**record, "loader": loader})

    def offer(step: int, figures: Mapping[str, Mapping[str, float]]) -> None:
        kind, name = best_metric(config.eval.best_metric)
        with _phase(run, "checkpoint"):
            if best and best.offer(step, figures[kind][name], run.state.params, record):
                log.info("step %d has the best %s so far: %.4f", step, config.eval.best_metric, figures[kind][name])

    stopped: Exception | None = None
    bar = tqdm(total=config.train.steps, initial=step, unit="step", disable=not _terminal())
    while step < config.train.steps:
        loaded = run.loader.state()
        questions = next(run.loader)
        try:
            state, metrics, trajectories, rewards = train_step(run, questions, step)
        except (Interrupted, RetrievalError) as stop:
            # Nothing of this step was learned: what is kept is the end of the last one, with its batch still to come.
            if step and checkpoints.latest() != step:
                save(step, loaded)
            checkpoints.wait()
            if isinstance(stop, Interrupted):
                done = f"saved behind step {step}" if step else "nothing was learned yet"
                raise Interrupted(done) from None
            log.error("the retriever is gone; saved behind step %d, the same command goes on from there", step)
            raise
        run.state = state
        if config.eval.every_steps and (step + 1) % config.eval.every_steps == 0 and step + 1 < config.train.steps:
            try:
                figures = _evaluate(run, config.eval.temperature)
                for kind, values in figures.items():
                    metrics |= {f"eval/{kind}/{name}": value for name, value in values.items()}
                offer(step + 1, figures)
            except (Interrupted, RetrievalError) as stop:  # the step is saved below, without this evaluation
                stopped = stop
        writer.write(step, metrics)
        _write_trajectories(workdir, step, trajectories, rewards, config.train.trajectories_per_step)
        _report(bar, step, metrics)
        if metrics["bad_in_a_row"] >= config.learning.max_bad_steps:
            raise UserError(
                f"step {step}: loss or gradient was not finite in {int(metrics['bad_in_a_row'])} updates in a row "
                f"(loss {metrics['loss']}, first in the gradient of {run.learner.culprit(metrics)}); lower "
                f"learning.learning_rate, or look at {workdir}/trajectories/{step:06d}.jsonl"
            )
        if metrics["status/not_finite"] == 1:  # no update is bad then, for there is nothing to learn from
            raise UserError(
                f"step {step}: no rollout had finite logits; config.model.sampling_dtype="
                f"{config.model.sampling_dtype}, accepted: one that holds the weights and activations of the model"
            )
        step += 1
        bar.update()
        if any(processes.together(lambda: run.stop_requested)) and step < config.train.steps:
            stopped = stopped or Interrupted()
        if step % config.train.checkpoint_every_steps == 0 or step == config.train.steps or stopped:
            save(step, run.loader.state())
        if stopped:
            raise Interrupted(f"saved behind step {step}") if isinstance(stopped, Interrupted) else stopped
    bar.close()

    # ---- evaluate after ----
    after = _evaluate_once(run, workdir / "after.json", fresh=True)
    checkpoints.wait()
    if best:
        offer(step, after[""])
        best.wait()
    run.wall_s["total"] = time.monotonic() - started
    summary = {
        "seed": config.seed,
        "steps": config.train.steps,
        "wall_s": {k: round(v, 2) for k, v in run.wall_s.items()},
        "compilations": {**run.collector.sampler.compilations(), **run.learner.compilations()},
        **({"best": best.record} if best else {}),
        "before": {},
        "after": {},
        **{f"before{suffix}": values for suffix, values in before.items()},
        **{f"after{suffix}": values for suffix, values in after.items()},
    }
    if processes.first():
        _write_json(workdir / "summary.json", summary)
    return summary


def train_step(
    run: Run, questions: Sequence[Question], step: int
) -> tuple[TrainState, dict[str, float], list[Trajectory], list[RewardParts]]:
    """One step of GRPO: rollouts, rewards, advantages, log-probs, one optimizer step per mini-batch.

    Args:
      questions: this process's.

    Returns:
      State, metrics, trajectories and rewards of all processes, the same in each.
    """
    config = run.config
    times: dict[str, float] = {}
    with _phase(run, "rollout", times):
        sampling = run.learner.sampling_copy(run.state.params)
        own = run.collector.collect(
            sampling,
            questions,
            config.rollout.samples,
            seed=config.seed,
            step=step,
            temperature=config.rollout.temperature,
            progress=lambda *_: _stop_if_asked(run),
        )
        del sampling
        # From here on every process holds all rollouts and does the same with them.
        trajectories = processes.in_order(own, config.rollout.samples)
    with _phase(run, "reward", times):
        rewards = [run.reward(t) for t in trajectories]
        totals = [r.total - _penalty(config, t) for r, t in zip(rewards, trajectories, strict=True)]
        groups = [(t.question.source, t.question.id) for t in trajectories]
        valid = [t.status != "not_finite" for t in trajectories]
        advantages = group_advantages(totals, groups, config.learning.advantage, valid)
        train_all = config.rollout.unfinished != "mask"
        batch = make_batch(trajectories, advantages, config.rollout.context_tokens, train_all)
    with _phase(run, "logprobs", times):
        old = run.learner.logprobs(run.state.params, batch)
        ref = old if run.reference is None else run.learner.reference_logprobs(run.reference, batch)
        batch = replace(batch, old_logprobs=old, ref_logprobs=ref)
    with _phase(run, "update", times):
        state, updates = run.state, []
        for piece in mini_batches(batch, config.learning.mini_batch_rollouts):
            state, metrics = run.learner.update(state, piece)
            updates.append(metrics)
    sampled = sum(int(t.mask.sum()) for t in trajectories)
    metrics = {name: mean([u[name] for u in updates]) for name in updates[0]}
    metrics["skipped"] = sum(u["skipped"] for u in updates)
    worst = max(updates, key=lambda u: u["bad_in_a_row"])  # not the last: a good one behind it starts anew at 0
    metrics |= {name: worst[name] for name in ("bad_in_a_row", "bad_gradient")}
    metrics |= rollout_metrics(trajectories, rewards, groups, advantages, old)
    metrics["reward"] = mean(totals)
    metrics |= {f"{name}_s": value for name, value in times.items()}
    metrics["sampled_tokens_per_s"] = sampled / times["rollout"]
    metrics["trained_tokens_per_s"] = float(batch.length.sum()) / (times["logprobs"] + times["update"])
    return state, metrics, trajectories, rewards


def rollout_metrics(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[RewardParts],
    groups: Sequence[Any],
    advantages: np.ndarray,
    logprobs: np.ndarray,
) -> dict[str, float]:
    """What happened in one batch of rollouts: behaviour by kind, reward parts by (kind, split or whole), alarms.

    Args:
      logprobs: [N, S] by the trainer.
    """
    out: dict[str, float] = {}
    n = len(trajectories)
    parts = RewardParts.__dataclass_fields__
    right = [exact_match(t.answer, t.question.answers) for t in trajectories]
    for kind in KINDS:
        rows = [i for i in range(n) if trajectories[i].question.kind == kind]
        if not rows:
            continue
        out[f"em/{kind}"] = mean(right[i] for i in rows)
        out[f"decomposition/{kind}"] = mean(trajectories[i].decomposed for i in rows)
        out[f"searches/{kind}"] = mean(len(trajectories[i].executed) for i in rows)
        out[f"turns/{kind}"] = mean(trajectories[i].model_calls for i in rows)
        for name, split in (("split", True), ("whole", False)):
            some = [i for i in rows if trajectories[i].decomposed == split]
            out |= {f"reward/{kind}/{name}/{part}": mean(getattr(rewards[i], part) for i in some) for part in parts}
    out["valid_format"] = mean(t.well_formed for t in trajectories)
    for status in END_STATUSES:
        out[f"status/{status}"] = mean(t.status == status for t in trajectories)
    silent: dict[Any, bool] = {}
    for group, advantage in zip(groups, advantages, strict=True):
        silent[group] = silent.get(group, True) and advantage == 0
    out["groups_without_signal"] = mean(silent.values())
    out["ids_per_trajectory"] = mean(len(t.ids) for t in trajectories)
    correct = [i for i in range(n) if right[i] and trajectories[i].mask.any()]
    out["logprob_of_correct"] = mean(
        logprobs[i, : len(trajectories[i].mask)][trajectories[i].mask].mean() for i in correct
    )
    seen = [i for i in range(n) if _saw_answer(trajectories[i])]
    out["wrong_though_seen"] = mean(not right[i] for i in seen)
    return out


def _saw_answer(trajectory: Trajectory) -> bool:
    golds = [normalise(a) for a in trajectory.question.answers]
    texts = [normalise(p.title + " " + p.text) for t in trajectory.turns for found in t.passages for p in found]
    return any(g and f" {g} " in f" {text} " for g in golds for text in texts)


def _penalty(config: Config, trajectory: Trajectory) -> float:
    unfinished = config.rollout.unfinished == "penalise" and trajectory.status != "answered"
    return config.reward.unfinished_penalty if unfinished else 0.0


# ---- evaluation ----


def _evaluate(run: Run, temperature: float) -> dict[str, dict[str, float]]:
    """Summary over the questions of the evaluation, `all` and per kind; no seed of training touches their keys."""
    sampling = run.learner.sampling_copy(run.state.params)
    bar = tqdm(total=len(run.evaluation), unit="question", leave=False, disable=not _terminal())

    def progress(done: int, own: int) -> None:
        bar.update(done * len(run.evaluation) // max(own, 1) - bar.n)
        _stop_if_asked(run)

    trajectories = evaluate(
        run.collector,
        sampling,
        run.evaluation,
        seed=run.config.eval.seed,
        step=EVAL_STEP,
        temperature=temperature,
        progress=progress,
    )
    bar.close()
    scores = [score(t) for t in trajectories]
    return {kind: summarise(group) for kind, group in {"all": scores, **by_kind(scores)}.items()}


def _evaluate_once(run: Run, file: Path, fresh: bool) -> dict[str, Any]:
    """Evaluates now, or reads what an earlier part of the same run has found. Keys: "" and "_greedy".

    Args:
      fresh: the policy is the one to evaluate; else what is not on disk is left out.
    """
    if not run.evaluation:
        return {}
    if not fresh:

        def read() -> dict[str, Any] | None:
            return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

        known = processes.agreed(read)
        if known is None:
            log.warning(
                "%s is not there, and the policy is a trained one by now: nothing is called %s", file, file.stem
            )
        return known or {}
    with _phase(run, "evaluate"):
        out = {"": _evaluate(run, run.config.eval.temperature)}
        if run.config.eval.also_greedy:
            out["_greedy"] = _evaluate(run, 0.0)
    if processes.first():
        _write_json(file, out)
    return out


# ---- small parts of the loop ----


def _stop_if_asked(run: Run) -> None:
    if run.stop_requested:
        raise Interrupted("SIGTERM arrived")


def _terminal() -> bool:
    """Whether progress is drawn; else it is logged."""
    return sys.stderr.isatty() and processes.first()


@contextmanager
def _phase(run: Run, name: str, times: dict[str, float] | None = None):
    """Adds the wall time of a block to the run's total of that phase, and to this step's."""
    start = time.monotonic()
    yield
    seconds = time.monotonic() - start
    run.wall_s[name] += seconds
    if times is not None:
        times[name] = seconds


def _report(bar: tqdm, step: int, metrics: Mapping[str, float]) -> None:
    if not processes.first():
        return
    kinds = " ".join(
        f"{kind} em {metrics[f'em/{kind}']:.2f} split {metrics[f'decomposition/{kind}']:.2f}"
        for kind in KINDS
        if f"em/{kind}" in metrics
    )
    seconds = sum(metrics[f"{phase}_s"] for phase in ("rollout", "reward", "logprobs", "update"))
    line = f"step {step} reward {metrics['reward']:.3f} {kinds} {seconds:.1f}s"
    if bar.disable:
        log.info(line)
    else:
        bar.set_postfix_str(line.removeprefix(f"step {step} "))
    if metrics["status/not_finite"]:
        log.warning(
            "step %d: %.1f%% of the rollouts had logits that are not finite; they are not learned from",
            step,
            100 * metrics["status/not_finite"],
        )
    split = metrics.get("decomposition/parallel")
    if step == 0 and split is not None and split < 0.05:
        log.warning(
            "only %.1f%% of the rollouts on parallel questions split them: groups without a single split carry no "
            "signal for it, so the behaviour may die out",
            100 * split,
        )


def _write_trajectories(
    workdir: Path, step: int, trajectories: Sequence[Trajectory], rewards: Sequence[RewardParts], count: int
) -> None:
    """One file per step, whole groups from the front."""
    if not processes.first():
        return
    directory = workdir / "trajectories"
    directory.mkdir(exist_ok=True)
    rows = [trajectory_row(t, r, step) for t, r in zip(trajectories[:count], rewards[:count], strict=True)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(directory / f"{step:06d}.jsonl", text)


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2) + "\n")
