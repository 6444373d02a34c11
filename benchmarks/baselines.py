"""`launch/bench.py baselines`: the paper's comparison in the closed world, every method trained with the same budget.

Trains each cold start by each method and seed (as `make demo` does), evaluates greedily on held-out questions, and
prints: the paper's table with chance and classic retrieval beside it, differences from search_r1 by
run, the decision to split before and after, and what the trained policies do with facts and names never seen.
Intervals are over runs, each a cold start and a seed. It goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.multihop_rag import write_multihop_rag
from psearch_jax.data.closed_world import ClosedWorld
from psearch_jax.eval.benchmarks import CLOSED_WORLD, KNOWN, MANY, PAIRS
from psearch_jax.eval.evaluate import read_scores
from psearch_jax.eval.scores import Score, by_kind, finished_by_turn, splitting, summarise
from psearch_jax.eval.tables import share, splitting_table, table
from psearch_jax.metrics import mean, spread
from psearch_jax.paths import write_whole
from psearch_jax.types import KINDS

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("r1", "search_r1", "parallel_prompt", "parallelsearch")
REFERENCE, OURS = "search_r1", "parallelsearch"
NAMES = (PAIRS, *KINDS, MANY, KNOWN)
SETS = tuple(f"{CLOSED_WORLD}:{name}" for name in NAMES)
Scores = Mapping[str, Sequence[Score]]  # by set, without its prefix
Runs = Mapping[str, Scores]  # by run, a cold start and a seed


def main(argv: Sequence[str]) -> None:
    flags = _flags(argv)
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    runs = {f"{i}-{seed}": (policy, seed) for i, policy in enumerate(flags.policies) for seed in flags.seeds}
    for run, (policy, seed) in runs.items():
        for method in flags.methods:
            _train(out / f"{method}-{run}", method, policy, seed, flags.steps)

    def scores(name: str, model: str | Path, *arguments: str) -> dict[str, list[Score]]:
        return _evaluate(out / "evaluations" / name, model, *arguments)

    every = [*(f"--benchmark={name}" for name in SETS), f"--count={flags.count}"]

    def by_set(name: str, model: str | Path, *arguments: str) -> Scores:
        found = scores(name, model, *every, *arguments)
        return {kind: found[full] for kind, full in zip(NAMES, SETS, strict=True)}

    def after(method: str) -> Runs:
        return {run: by_set(f"{method}-{run}", out / f"{method}-{run}") for run in runs}

    by_method = {
        "before": {str(i): by_set(f"before-{i}", policy) for i, policy in enumerate(flags.policies)},
        "classic retrieval": {
            str(i): by_set(f"classic-{i}", policy, "--initial_search=true", "--search_turns=0")
            for i, policy in enumerate(flags.policies)
        },
        **{method: after(method) for method in flags.methods},
    }
    sampled = {
        "before": {str(i): by_set(f"before-{i}-t1", p, "--temperature=1") for i, p in enumerate(flags.policies)},
        "after": {run: by_set(f"{OURS}-{run}-t1", out / f"{OURS}-{run}", "--temperature=1") for run in runs},
    }

    report: dict[str, Any] = {"arguments": vars(flags)}
    parts = ["EM, greedy: mean and 95% interval over runs:", em_table(by_method)]
    parts += ["What it takes, greedy, mean over runs:", cost_table(by_method)]
    parts += ["Share of parallel questions finished by turn:", finished_table(by_method)]
    report["differences"] = {m: _differences(by_method, m) for m in flags.methods if m != REFERENCE}
    parts += [f"Differences from {REFERENCE}, run by run:", _differences_table(report["differences"])]
    for moment, found in sampled.items():
        report[f"splitting {moment}"] = {
            name: splitting([s for scores in found.values() for s in scores[name]]) for name in (PAIRS, *KINDS)
        }
    parts += [
        "The decision to split, sampled at temperature 1, minimal pairs first:",
        splitting_table(
            {
                f"{name}, {moment}": {"splitting": report[f"splitting {moment}"][name]}
                for name in (PAIRS, *KINDS)
                for moment in sampled
            }
        ),
    ]
    report["elsewhere"] = _elsewhere(out, scores, flags.policies, list(runs), flags.count)
    parts += [
        "With other facts, and with names that no cold start has seen, greedy:",
        _cross_table(report["elsewhere"]),
    ]
    text = "\n\n".join(parts) + "\n"
    write_whole(out / "baselines.md", text)
    write_whole(out / "baselines.json", json.dumps(report, indent=2) + "\n")
    print(text, end="")


def em_table(by_method: Mapping[str, Runs]) -> str:
    """EM per set and on average over the kinds, as the paper's main table; chance above it."""
    any_run = next(iter(next(iter(by_method.values())).values()))
    rows = [["method", "runs", *NAMES, "average of kinds"]]
    chances = {name: summarise(any_run[name]).get("chance", 0.0) for name in NAMES}
    average = share(mean(chances[kind] for kind in KINDS))
    rows.append(["chance", "", *(share(chances[name]) for name in NAMES), average])
    for method, runs in by_method.items():
        em = {name: [mean(s.em for s in found[name]) for found in runs.values()] for name in NAMES}
        overall = [mean(em[kind][i] for kind in KINDS) for i in range(len(runs))]
        rows.append([method, str(len(runs)), *(_with_interval(em[name]) for name in NAMES), _with_interval(overall)])
    return table(rows)


def _with_interval(values: Sequence[float]) -> str:
    centre, low, high = spread(values)
    return share(centre) if low == high else f"{share(centre)} ({share(max(0.0, low))}-{share(min(1.0, high))})"


def cost_table(by_method: Mapping[str, Runs]) -> str:
    """Turns and splitting where splitting is a question."""
    shown = (PAIRS, "parallel", MANY, "sequential")
    rows = [["method", "decided right on pairs"]]
    for name in shown[1:]:
        rows[0] += [f"turns {name}", f"split {name}"]
    for method, runs in by_method.items():
        figures = {name: [summarise(found[name]) for found in runs.values()] for name in shown}
        row = [method, _with_interval([f["decided"] for f in figures[PAIRS]])]
        for name in shown[1:]:
            row.append(f"{mean(f['turns'] for f in figures[name]):.2f}")
            row.append(_with_interval([f["decomposition_ratio"] for f in figures[name]]))
        rows.append(row)
    return table(rows)


def finished_table(by_method: Mapping[str, Runs]) -> str:
    rows = [["method", *map(str, range(1, 7))]]
    for method, runs in by_method.items():
        shares = [finished_by_turn(found["parallel"]) for found in runs.values()]
        rows.append([method, *(share(mean(column)) for column in zip(*shares, strict=True))])
    return table(rows)


def _differences(by_method: Mapping[str, Runs], method: str) -> dict[str, dict[str, list[float]]]:
    """Of every run, the method's EM minus the reference's, and the ratio of turns."""
    out = {}
    for name in ("parallel", MANY, "sequential", KNOWN):
        pairs = [(by_method[REFERENCE][run][name], found[name]) for run, found in by_method[method].items()]
        out[name] = {
            "em": [mean(s.em for s in own) - mean(s.em for s in theirs) for theirs, own in pairs],
            "turns": [mean(s.turns for s in own) / mean(s.turns for s in theirs) for theirs, own in pairs],
        }
    return out


def _differences_table(found: Mapping[str, Any]) -> str:
    rows = [["method", "questions", "EM difference", "95% over runs", "turns ratio", "95% over runs"]]
    for method, kinds in found.items():
        for kind, values in kinds.items():
            em, turns = spread(values["em"]), spread(values["turns"])
            rows.append(
                [method, kind, f"{em[0]:+.3f}", f"{em[1]:+.3f} to {em[2]:+.3f}"]
                + [f"{turns[0]:.3f}", f"{turns[1]:.3f}-{turns[2]:.3f}"]
            )
    return table(rows)


def _elsewhere(
    out: Path, scores: Any, policies: Sequence[str], runs: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """Rows of world, policy, kind and figures."""
    rows = []

    def add(world: str, policy: str, found: Sequence[Score]) -> None:
        for kind, group in by_kind(found).items():
            rows.append({"world": world, "policy": policy, "kind": kind, **summarise(group)})

    worlds = {"other facts": ["--world_seed=1"], "new names": ["--world_seed=1", "--world_names=new"]}
    models = {f"before-{i}": policy for i, policy in enumerate(policies)}
    models |= {f"{OURS}-{run}": out / f"{OURS}-{run}" for run in runs}
    sets = [f"--benchmark={CLOSED_WORLD}:{kind}" for kind in ("parallel", "sequential", "single")]
    for world, extra in worlds.items():
        for policy, model in models.items():
            name = f"{policy}-in-{world.replace(' ', '-')}"
            found = scores(name, model, *sets, f"--count={count // 2}", *extra)
            add(world, policy, [s for group in found.values() for s in group])
    asked, corpus = write_multihop_rag(ClosedWorld.make(0), out, count // 2)
    index = out / "multihop-index"
    if not index.is_dir():
        _run("build_index.py", f"--corpus={corpus}", "--encoder=hashing", f"--out={index}")
    for policy, model in models.items():
        arguments = (f"--benchmark=multihoprag:{asked}", f"--index={index}")
        add("MultiHop-RAG files", policy, scores(f"{policy}-multihoprag", model, *arguments)["multihoprag"])
    return rows


def _cross_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The policies before training, and the trained ones, each as a mean."""
    rows = [["world", "policy", "questions", "EM", "chance", "split", "turns", "valid"]]
    keys = list(dict.fromkeys((row["world"], row["policy"].startswith("before"), row["kind"]) for row in found))
    for world, early, kind in keys:
        group = [r for r in found if (r["world"], r["policy"].startswith("before"), r["kind"]) == (world, early, kind)]
        cells = [share(mean(row["em"] for row in group))]
        cells.append(share(group[0].get("chance")))
        cells.append(share(mean(row["decomposition_ratio"] for row in group)))
        policy = f"{'before' if early else 'after'}, mean of {len(group)}"
        turns, valid = (mean(row[key] for row in group) for key in ("turns", "valid_format"))
        rows.append([world, policy, kind, *cells, f"{turns:.2f}", share(valid)])
    return table(rows)


def _train(workdir: Path, method: str, policy: str, seed: int, steps: int) -> None:
    if (workdir / "summary.json").is_file():
        return
    settings = {"method": method, "seed": seed, "model.path": policy}
    settings |= {"train.steps": steps, "train.checkpoint_every_steps": steps}
    settings |= {"eval.questions_per_kind": 0}  # evaluated below, on the same questions for all
    arguments = [f"--config.{name}={value}" for name, value in settings.items()]
    _run("train.py", "--config=configs/smoke.py", *arguments, f"--workdir={workdir}")


def _evaluate(out: Path, model: str | Path, *arguments: str) -> dict[str, list[Score]]:
    if not (out / "results.json").is_file():
        _run("eval.py", f"--model={model}", "--config=configs/smoke.py", *arguments, f"--out={out}", *_method(model))
    return read_scores(out)


def _method(model: str | Path) -> list[str]:
    """A trained policy is evaluated by the method that trained it."""
    method = Path(model).name.partition("-")[0]
    return [f"--method={method}"] if method in METHODS else []


def _run(program: str, *arguments: str) -> None:
    print(" ".join([program, *arguments]), file=sys.stderr, flush=True)
    command = [sys.executable, str(ROOT / "launch" / program), *arguments]
    subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench baselines", description=__doc__)
    parser.add_argument("--out", required=True, help="directory for the runs, their evaluations and the tables")
    parser.add_argument("--policies", nargs="+", default=["toy"], help="cold starts: toy, or what launch/sft.py made")
    asked = f"{REFERENCE} and {OURS} at least"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help=asked)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--count", type=int, default=200, help="questions per set")
    flags = parser.parse_args(argv)
    if not {REFERENCE, OURS} <= set(flags.methods):
        parser.error(f"--methods: found {' '.join(flags.methods)}, accepted: {asked}")
    return flags
