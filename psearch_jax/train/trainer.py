"""The main loop: collect, reward, update, log, save; with an evaluation before the first step and after the last.

A run directory holds config.json, metrics.jsonl, tensorboard/, trajectories/, checkpoints/, best/, summary.json.
Several processes share one: all save and restore the checkpoints, the first one writes the rest.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flax import nnx
from tqdm import tqdm

from psearch_jax import processes
from psearch_jax.config import Config, best_metric, to_mapping
from psearch_jax.data.loader import QuestionLoader
from psearch_jax.eval.benchmarks import PAIRS, is_paired
from psearch_jax.eval.evaluate import evaluate, questions_digest, trajectory_row
from psearch_jax.eval.scores import by_kind, score, summarise
from psearch_jax.metrics import MetricsWriter, cut_jsonl, mean
from psearch_jax.paths import locate, make_writable, write_whole
from psearch_jax.rl.advantages import group_advantages
from psearch_jax.rl.batch import make_batch, mini_batches
from psearch_jax.rl.rewards import length_penalty
from psearch_jax.rollout.collect import Collector
from psearch_jax.train import settings
from psearch_jax.train.best import Best
from psearch_jax.train.checkpoint import Checkpoints, model_record
from psearch_jax.train.figures import rollout_metrics, update_peak_share
from psearch_jax.train.preemption import HostCopy, Interrupted, StopRequest, room_for_copy
from psearch_jax.train.state import TrainState, updates_per_step, warmup_updates, with_warmup
from psearch_jax.train.step import Learner
from psearch_jax.types import KINDS, Question, RewardParts, TrainBatch, Trajectory, UserError
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
    abstract: TrainState  # the state's ShapeDtypeStructs, with the place of each
    fresh: Callable[[], TrainState] | None  # makes the state of step 0; holds the weights that it starts from
    model: Any  # Qwen2Config
    tokenizer_path: str
    given: Config  # as the user has it: what config.json records
    reference: nnx.State | None = None  # None when the KL coefficient is 0
    lora: dict[str, Any] | None = None  # what a checkpoint of adapters says about the weights beside them
    settings: settings.Record = field(default_factory=dict)  # what decides the run's numbers
    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stop: StopRequest = field(default_factory=StopRequest)
    keeps_copy: bool = False  # of the state, in host memory, while a step's updates go on
    _state: TrainState | None = None

    @property
    def state(self) -> TrainState:
        """The state behind the last step. It is made when first asked for: a run that resumes never holds two."""
        if self._state is None:
            assert self.fresh is not None, "the state was given up"
            self.state = self.fresh()
        return self._state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        self._state, self.fresh = state, None

    @property
    def has_state(self) -> bool:
        """Whether there is one, or can be: a step given up between its updates may have used it up."""
        return self._state is not None or self.fresh is not None


def train(run: Run, workdir: str | Path, allow_changes: bool = False) -> dict[str, Any]:
    """Runs until `train.steps`, from wherever the workdir stands, and returns the summary it wrote.

    Args:
      allow_changes: go on although settings differ that decide the run's numbers.

    Raises:
      Interrupted: after SIGTERM, once the checkpoint is on disk.
      RetrievalError: the retriever is gone for good, once the last whole step is on disk.
      UserError: the settings are not those of the run, too many updates in a row were not finite, or the run
        directory cannot be read or written.
    """
    try:
        with ExitStack() as closers:
            closers.enter_context(run.stop.heard())
            return _train(run, locate(workdir), closers, allow_changes)
    except OSError as error:
        if processes.lost(error):
            raise
        raise UserError(
            f"{error.filename or workdir}: cannot be written ({error.strerror or error}); the checkpoints of "
            f"{workdir} are whole, and the same command goes on from the newest"
        ) from error


def _train(run: Run, workdir: Path, closers: ExitStack, allow_changes: bool) -> dict[str, Any]:
    config = run.config
    make_writable(workdir)  # a directory that takes no files is met here, not at the first save
    started = time.monotonic()

    # ---- resume ----
    checkpoints = Checkpoints(workdir / "checkpoints", config.train.keep_checkpoints, config.train.keep_every_steps)
    closers.enter_context(closing(checkpoints))
    step = _resume(run, checkpoints, workdir, allow_changes) if checkpoints.latest() is not None else 0
    if processes.first():
        _write_config(workdir, run.given, step)
        cut_jsonl(workdir / "metrics.jsonl", step)
        for file in (workdir / "trajectories").glob("*.jsonl"):
            if int(file.stem) >= step:
                file.unlink()
    writer = closers.enter_context(closing(MetricsWriter(workdir)))
    if updates_per_step(config) > 1:
        run.keeps_copy = room_for_copy(run.state)
        if not run.keeps_copy:
            log.warning("no host memory for a copy of the state: SIGTERM during updates costs what is not saved yet")

    # ---- evaluate before ----
    run.stop.watch()()
    with _phase(run, "compile"):
        sampling = run.learner.sampling_copy(run.state.params)
        run.collector.warm_up(sampling)
        del sampling
        run.learner.warm_up(run.state.params, run.reference)
    run.stop.watch()()
    before = _evaluate_once(run, workdir / "before.json", fresh=step == 0)

    # ---- steps ----
    record = {"model": model_record(run.model), "tokenizer": run.tokenizer_path, "settings": run.settings}
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

    saved, minutes = time.monotonic(), config.train.checkpoint_every_minutes
    stopped: Exception | None = None
    bar = tqdm(total=config.train.steps, initial=step, unit="step", disable=not _terminal())
    while step < config.train.steps:
        loaded = run.loader.state()
        questions = next(run.loader)
        try:
            state, metrics, trajectories, rewards = train_step(run, questions, step)
        except (Interrupted, RetrievalError) as stop:
            # Nothing of this step was learned: what is kept is the end of the last one, with its batch still to come.
            if step and checkpoints.latest() != step and run.has_state:
                save(step, loaded)
            checkpoints.wait()
            if isinstance(stop, Interrupted):
                kept = step if run.has_state else checkpoints.latest()
                raise Interrupted(f"saved behind step {kept}" if kept else "nothing was learned yet") from None
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
        heard = processes.together(lambda: (run.stop.arrived, (time.monotonic() - saved) / 60 >= minutes > 0))  # noqa: B023
        if any(asked for asked, _ in heard) and step < config.train.steps:
            stopped = stopped or Interrupted()
        late = heard[0][1]  # by the clock of the first process
        if step % config.train.checkpoint_every_steps == 0 or step == config.train.steps or late or stopped:
            save(step, run.loader.state())
            saved = time.monotonic()
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
            progress=lambda *_: run.stop.check(),
        )
        del sampling
        usage = run.collector.usage
        # From here on every process holds all rollouts and does the same with them.
        trajectories = processes.in_order(own, config.rollout.samples)
    with _phase(run, "reward", times):
        rewards = [run.reward(t) for t in trajectories]
        charged, context = config.rollout.unfinished == "penalise", config.rollout.context_tokens
        penalties = [length_penalty(t, config.reward, charged, context) for t in trajectories]
        totals = [r.total - penalty for r, penalty in zip(rewards, penalties, strict=True)]
        groups = [(t.question.source, t.question.id) for t in trajectories]
        valid = [t.status != "not_finite" for t in trajectories]
        advantages = group_advantages(totals, groups, config.learning.advantage, valid)
        train_all = config.rollout.unfinished != "mask"
        batch = make_batch(trajectories, advantages, config.rollout.context_tokens, train_all)
    with _phase(run, "logprobs", times):
        look = run.stop.watch()
        if run.learner.needs_old:
            batch = replace(batch, old_logprobs=run.learner.logprobs(run.state.params, batch, look))
        if run.reference is not None:
            batch = replace(batch, ref_logprobs=run.learner.reference_logprobs(run.reference, batch, look))
    with _phase(run, "update", times):
        state, updates = _update(run, mini_batches(batch, config.learning.mini_batch_rollouts))
    sampled = sum(int(t.mask.sum()) for t in trajectories)
    metrics = {name: mean([u[name] for u in updates]) for name in updates[0]}
    metrics["skipped"] = sum(u["skipped"] for u in updates)
    worst = max(updates, key=lambda u: u["bad_in_a_row"])  # not the last: a good one behind it starts anew at 0
    metrics |= {name: worst[name] for name in ("bad_in_a_row", "bad_gradient")}
    metrics["learning_rate"] = updates[-1]["learning_rate"]
    metrics |= rollout_metrics(trajectories, rewards, groups, advantages)
    metrics["reward"] = mean(totals)
    metrics |= {f"{name}_s": value for name, value in times.items()}
    metrics |= usage.metrics()
    metrics["sampled_tokens_per_s"] = sampled / times["rollout"]
    metrics["trained_tokens_per_s"] = float(batch.length.sum()) / (times["logprobs"] + times["update"])
    share = update_peak_share(config, run.model, batch, times["update"])
    metrics |= {"update_peak_share": share} if share else {}
    return state, metrics, trajectories, rewards


def _update(run: Run, pieces: Sequence[TrainBatch]) -> tuple[TrainState, list[dict[str, float]]]:
    """One optimizer step per piece; the state and the metrics of each.

    The first of them uses up the arrays of `run.state`. A request to stop is followed between any two micro-batches:
    the state from before is then put back from host memory, or is gone where that had no room for it.
    """
    state, metrics, look = run.state, [], run.stop.watch()
    copy = HostCopy(state) if run.keeps_copy and len(pieces) > 1 else None
    try:
        for piece in pieces:
            state, values = run.learner.update(state, piece, look)
            metrics.append(values)
    except Interrupted:
        if metrics:
            run.state = state = None  # first make room
            run.state = copy.state() if copy else None
        raise
    return state, metrics


# ---- evaluation ----


def _evaluate(run: Run, temperature: float) -> dict[str, dict[str, float]]:
    """Summary over the questions of the evaluation, `all` and per kind; the closed world's minimal pairs stay apart.

    No seed of training touches their keys.
    """
    sampling = run.learner.sampling_copy(run.state.params)
    bar = tqdm(total=len(run.evaluation), unit="question", leave=False, disable=not _terminal())

    def progress(done: int, own: int) -> None:
        bar.update(done * len(run.evaluation) // max(own, 1) - bar.n)
        run.stop.check()

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
    pairs = [s for s in scores if is_paired(s.source)]
    others = [s for s in scores if not is_paired(s.source)]
    groups = {"all": others, **by_kind(others)} | ({PAIRS: pairs} if pairs else {})
    return {name: summarise(group) for name, group in groups.items()}


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


def _resume(run: Run, checkpoints: Checkpoints, workdir: Path, allow_changes: bool) -> int:
    """Puts the newest whole checkpoint and the loader's position into the run; returns its step."""
    changes: dict[str, str] = {}

    def accept(loop: Mapping[str, Any]) -> None:
        changes.update(processes.agreed(lambda: settings.differences(loop.get("settings"), run.settings)))
        if changes and not allow_changes:
            raise UserError(
                f"{workdir}: behind step {loop['step']} this run would go on with other settings than it was made "
                f"with, {settings.described(changes)}; accepted: those it was made with, or --allow_changes"
            )

    run.fresh = None  # the weights that a new run starts from make room for those that are read
    run.state, loop = checkpoints.restore(run.abstract, accept)
    step, config = int(loop["step"]), run.config
    log.info("resuming behind step %d", step)
    if changes:
        log.warning("going on with other settings: %s", settings.described(changes))
    if "learning.warmup_ratio" in changes:
        total = updates_per_step(config) * config.train.steps
        run.state = with_warmup(run.state, warmup_updates(config.learning, total))
    try:
        run.loader.restore(loop["loader"])
    except UserError as error:
        if not changes:
            raise
        log.warning("the questions begin anew (%s)", error)
    return step


def _write_config(workdir: Path, config: Config, step: int) -> None:
    """Writes config.json; one that says something else is kept beside it, named by the last step it was used for."""
    file, now = workdir / "config.json", to_mapping(config)
    try:
        before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else now
    except ValueError:
        before = None
    if before != now:
        kept = workdir / f"config.until_{step:06d}.json"
        while kept.exists():
            kept = kept.with_name(f"{kept.stem}.again.json")
        file.rename(kept)
        log.info("config.json is written anew; the one before is kept as %s", kept)
    _write_json(file, now)


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
