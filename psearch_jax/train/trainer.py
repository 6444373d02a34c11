"""The training loop. A step: rollout, reward, advantage, score, update; then evaluate, save.

A run directory holds config.json, metrics.jsonl, tensorboard/, trajectories/, checkpoints/, best/, summary.json.
Several processes share one directory: all save and restore the checkpoints; the first writes the other files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from psearch_jax.config import to_mapping
from psearch_jax.eval.evaluate import questions_digest
from psearch_jax.rl import gae
from psearch_jax.rl.advantages import trained_rows
from psearch_jax.rl.batch import make_batch, mini_batches, select_rows
from psearch_jax.rl.losses import NO_KL
from psearch_jax.runtime import cli, processes
from psearch_jax.runtime.compiling import abstract, compile_all
from psearch_jax.runtime.metrics import MetricsWriter
from psearch_jax.runtime.paths import locate, make_writable
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.best import Best
from psearch_jax.train.checkpointing.checkpoint import Checkpoints
from psearch_jax.train.checkpointing.preemption import Interrupted
from psearch_jax.train.critic import CRITIC
from psearch_jax.train.monitoring import validation
from psearch_jax.train.monitoring.alarms import SETTINGS_CHANGED, Alarms, check_finite, read_rows
from psearch_jax.train.monitoring.figures import learns_policy, step_metrics
from psearch_jax.train.monitoring.records import report, truncate_workdir, write_json, write_trajectories
from psearch_jax.train.replay import record, remove_from
from psearch_jax.train.rollouts import Rollouts, collect_rollouts
from psearch_jax.train.run import Run
from psearch_jax.train.saving import Saver, Start, resume
from psearch_jax.train.state import TrainState
from psearch_jax.train.trainable import never_stop
from psearch_jax.types import Question, RewardParts, TrainBatch, Trajectory, UserError
from retrieval.protocol import RetrievalError

TRAJECTORIES_PER_STEP = 64  # written to trajectories/


def train(run: Run, workdir: str | Path, allow_changes: bool = False, log_to: str = "") -> dict[str, Any]:
    """Trains until `train.steps`, resuming from the workdir's newest checkpoint; returns the summary it wrote.

    Args:
      allow_changes: resume even if settings that affect the results have changed.
      log_to: `log` of `MetricsWriter`.

    Raises:
      Interrupted: after SIGTERM or Ctrl-C, once the checkpoint is on disk.
      RetrievalError: the retriever stayed unreachable; raised once the last complete step is on disk.
      UserError: the settings differ from those of the run, too many updates in a row were not finite, or the run
        directory cannot be read or written.
    """
    try:
        with ExitStack() as closers:
            closers.enter_context(run.stop.listen())
            return _train(run, locate(workdir), closers, allow_changes, log_to)
    except OSError as error:
        # Rewards and retrievers raise such errors too, of other files and of connections.
        in_workdir = error.filename and Path(str(error.filename)).absolute().is_relative_to(Path(workdir).absolute())
        if processes.is_lost(error) or not (in_workdir or error.errno in cli.OF_DISK):
            raise
        raise UserError(
            f"{error.filename or workdir}: cannot be read or written ({error.strerror or error}); the same command "
            f"resumes from the newest complete checkpoint of {workdir}, if there is one"
        ) from error


def _train(run: Run, workdir: Path, closers: ExitStack, allow_changes: bool, log_to: str) -> dict[str, Any]:
    config, started = run.config, time.monotonic()
    make_writable(workdir)  # fail now rather than at the first save
    checkpoints = closers.enter_context(closing(Checkpoints(workdir / "checkpoints", config.train.keep_checkpoints)))
    start = Start()
    if checkpoints.latest() is not None:
        start = resume(run, checkpoints, workdir, allow_changes)
    elif run.state is None:
        run.begin()
    if run.recording is not None:
        run.recording.check_steps(start.step, config.train.steps)
    if processes.first():
        truncate_workdir(workdir, run.user_config, start.step)
        remove_from(workdir, start.step)
        if settings.affect_evaluation(start.changes, run.settings):
            (workdir / "before.json").unlink(missing_ok=True)  # cannot be compared with evaluations from now on
    writer = closers.enter_context(closing(MetricsWriter(workdir, log=log_to, config=to_mapping(run.user_config))))
    best = None
    if config.eval.every_steps and run.evaluation:
        # At step 0, any best checkpoint comes from a run that was killed before its first regular checkpoint.
        until = start.step if start.changes or start.step == 0 else None
        digest = questions_digest(run.evaluation)
        best = closers.enter_context(closing(Best(workdir, config.eval.best_metric, digest, run.settings, until)))
    saver = Saver(run, checkpoints, writer, best)
    try:
        _compile(run)
        before = validation.evaluate_once(run, workdir / "before.json", policy_unchanged=start.step == 0)
        if start.evaluation_due and best and start.step < config.train.steps:
            writer.amend(start.step - 1, _evaluate(run, saver, start.step))
        step = _take_steps(run, workdir, saver, start)
        after = validation.evaluate_once(run, workdir / "after.json", policy_unchanged=True)
        checkpoints.wait()
        if best:
            saver.offer(step, after[""])
            best.wait()
    except (Interrupted, RetrievalError) as stop:
        saver.end(stop)
    run.wall_s["total"] = time.monotonic() - started
    summary = {
        "seed": config.seed,
        "steps": step,  # above train.steps if the resumed checkpoint is already past it
        "wall_s": {k: round(v, 2) for k, v in run.wall_s.items()},
        **({"best": best.record} if best else {}),
        "before": {},
        "after": {},
        **{f"before{suffix}": values for suffix, values in before.items()},
        **{f"after{suffix}": values for suffix, values in after.items()},
    }
    if processes.first():
        write_json(workdir / "summary.json", summary)
    return summary


def _take_steps(run: Run, workdir: Path, saver: Saver, start: Start) -> int:
    """Takes all steps from `start` on, evaluates between them, and saves; returns the number of completed steps."""
    config, step, changed = run.config, start.step, bool(start.changes)
    may_search = config.rollout.search_turns > 0
    # Only the first process truncates and writes metrics.jsonl, and reports.
    alarms = Alarms(may_search, read_rows(workdir / "metrics.jsonl")) if processes.first() else None
    stopped: Interrupted | RetrievalError | None = None
    bar = tqdm(total=config.train.steps, initial=step, unit="step", disable=not processes.on_terminal())
    while step < config.train.steps:
        position = run.loader.state(), run.stream.in_flight()
        try:
            metrics, rollouts = train_step(run, next(run.loader), step)
        except (Interrupted, RetrievalError):
            saver.save(step, *position)
            raise
        metrics |= {SETTINGS_CHANGED: 1.0} if changed else {}
        metrics |= alarms.update(step, metrics) if alarms else {}
        changed, is_last = False, step + 1 == config.train.steps
        evaluation_due = saver.best is not None and not is_last and (step + 1) % config.eval.every_steps == 0
        if evaluation_due:
            try:
                metrics |= _evaluate(run, saver, step + 1)
                evaluation_due = False
            except (Interrupted, RetrievalError) as stop:  # the step is saved below; a resumed run evaluates
                stopped = stop
        saver.writer.write(step, metrics)
        write_trajectories(workdir, step, rollouts.trajectories, rollouts.rewards, TRAJECTORIES_PER_STEP)
        if config.train.record_rollouts and run.recording is None:
            record(workdir, step, rollouts.draws)
        report(bar, step, metrics, may_split=may_search and config.retrieval.max_sub_queries > 1)
        check_finite(run, workdir, step, metrics)
        step += 1
        bar.update()
        requests = processes.allgather(lambda: (run.stop.arrived, saver.is_late()))
        if any(arrived for arrived, _ in requests) and not is_last:
            stopped = stopped or Interrupted()
        is_late = requests[0][1]  # by the clock of the first process
        if step % config.train.checkpoint_every_steps == 0 or is_last or is_late or stopped:
            saver.save(step, run.loader.state(), run.stream.in_flight(), evaluation_due)
        if stopped:
            raise stopped
    bar.close()
    return step


def _evaluate(run: Run, saver: Saver, step: int) -> dict[str, float]:
    """The metrics of an evaluation after `step` steps. The policy is kept if it is the best so far."""
    figures = validation.evaluate_policy(run, run.config.eval.temperature)
    saver.offer(step, figures)
    return {f"eval/{kind}/{name}": value for kind, values in figures.items() for name, value in values.items()}


def train_step(run: Run, questions: Sequence[Question], step: int) -> tuple[dict[str, float], Rollouts]:
    """One step of GRPO or PPO, after which `run.state` is the new state. The same result in every process.

    Args:
      questions: those of this process.

    Returns:
      The metrics of the step and its rollouts.

    Raises:
      Interrupted, RetrievalError: the step is discarded. `run.state` is the state before it.
    """
    config, times = run.config, dict[str, float]()
    rollouts = collect_rollouts(run, questions, step, times)  # with rewards and advantages
    rows = trained_rows(rollouts.advantages, config.rollout.samples, config.train.prompts)
    trained = [rollouts.trajectories[i] for i in rows]
    batch = make_batch(trained, rollouts.advantages[rows], config.rollout.context_tokens)
    with run.phase("logprobs", times):
        batch = _score(run, batch, trained, [rollouts.rewards[i] for i in rows])
    with run.phase("update", times):
        run.state, updates = _update(run, batch, step)
    return step_metrics(run, step, rollouts, batch, updates, times), rollouts


def _score(
    run: Run, batch: TrainBatch, trajectories: Sequence[Trajectory], rewards: Sequence[RewardParts]
) -> TrainBatch:
    """Adds the log-probs that the loss needs and, with a critic, values, returns and advantages.

    The unknown sampler of scripted rows is taken to be the present policy: their ratio is 1 in the first update, and
    their importance weight is 1.

    Args:
      trajectories, rewards: N, of the rows.
    """
    learning, check_stop, state = run.config.learning, run.stop.checker(), run.current_state()
    if run.learner.needs_score:
        batch = replace(batch, old_logprobs=run.learner.score(state.params, batch, check_stop))
    scripted = np.flatnonzero([t.scripted for t in trajectories])
    if len(scripted):
        own, sampler = select_rows(batch, scripted), batch.sampler_logprobs.copy()
        scored = run.learner.needs_score
        sampler[scripted] = own.old_logprobs if scored else run.learner.score(state.params, own, check_stop)
        batch = replace(batch, sampler_logprobs=sampler)
    if run.reference is not None:
        batch = replace(batch, ref_logprobs=_reference_logprobs(run, batch, rewards, check_stop))
    if run.critic is None or state.critic is None:
        return batch
    values = run.critic.score(state.critic.params, batch, check_stop)
    old = batch.sampler_logprobs if learning.old_logprobs == "sampler" else batch.old_logprobs
    kl_coefficient = learning.kl_coefficient if learning.kl_in == "reward" else 0.0
    totals, ref = np.asarray([parts.total for parts in rewards]), batch.ref_logprobs
    per_token = gae.token_rewards(totals, batch.mask, old, np.where(ref == NO_KL, old, ref), kl_coefficient)
    raw, returns = gae.estimate_advantages(per_token, values, batch.mask, learning.gae_lambda)
    return replace(batch, advantage=gae.whiten(raw, batch.mask), values=values, returns=returns)


def _reference_logprobs(
    run: Run, batch: TrainBatch, rewards: Sequence[RewardParts], check_stop: Callable[[], None]
) -> np.ndarray:
    """[N, S] float32; with `kl_to=wrong`, rows with a right outcome are not scored and have NO_KL everywhere."""
    if run.config.learning.kl_to == "all":
        return run.learner.reference_score(run.reference, batch, check_stop)
    wrong = np.flatnonzero([parts.terms["outcome"] < 1 for parts in rewards])
    out = np.full(batch.ids.shape, NO_KL, np.float32)
    out[wrong] = run.learner.reference_score(run.reference, select_rows(batch, wrong), check_stop)
    return out


def _update(run: Run, batch: TrainBatch, step: int) -> tuple[TrainState, list[dict[str, float]]]:
    """Takes one optimizer step per mini-batch, the critic first. Returns the new state, and the metrics of each.

    A stop request takes effect between the micro-batches of the first optimizer step, which donates the state of the
    run. From then on the step is completed.
    """
    state, check_stop, metrics = run.current_state(), run.stop.checker(), []
    for mini_batch in mini_batches(batch, run.config.learning.mini_batch_rollouts):
        values: dict[str, float] = {}
        if run.critic is not None:
            critic, of_critic = run.critic.update(state.critic, mini_batch, check_stop)
            state, check_stop = replace(state, critic=critic), never_stop
            values |= {CRITIC + name: value for name, value in of_critic.items()}
        if learns_policy(run, step):
            policy, of_policy = run.learner.update(replace(state, critic=None), mini_batch, check_stop)
            state, check_stop = replace(policy, critic=state.critic), never_stop
            values |= of_policy
        metrics.append(values)
    return state, metrics


def _compile(run: Run) -> None:
    """Compiles every program of a step and of its rollouts."""
    run.stop.checker()()
    with run.phase("compile"):
        programs = run.learner.programs(run.reference)
        programs += run.critic.programs() if run.critic is not None else []
        if run.recording is None:
            weights = jax.tree.map(abstract, run.sampling_weights())  # frees the copy before anything is compiled
            run.collector.warm_up(weights, suspends=run.config.train.staleness > 0, others=programs)
        else:
            compile_all(programs)
    run.stop.checker()()
