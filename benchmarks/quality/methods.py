"""`launch/bench.py methods`: one table of policies under every method, and two baselines, on question files.

    python launch/bench.py methods --policy 0.5b DIR --policy trained DIR ADAPTERS --out=OUT \\
        --index=INDEX --benchmark=2wiki:test.jsonl --benchmark=hotpotqa:hotpotqa.jsonl --config.rollout.slots=24

Every line is a call of `launch/eval.py`, which gets all flags that this program does not define: passages, benchmarks,
token budgets. Its results stay in OUT/POLICY/METHOD, so the same command resumes after an interruption, and a policy
or a method can be added later. For an evaluation `parallelsearch` equals `parallel_prompt`: only their rewards differ.

`search_r1` and `parallel` use the prompt of `--config.data.template`; `closed book` uses `direct`. The other two do
not search on their own and use `passages`. `retrieve first` searches for the question once (classic
retrieval-augmented generation). `gold passages` puts the passages that state the facts into the context, an upper
limit for every retriever.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.timing import log, written
from psearch_jax.eval.tables import table
from psearch_jax.types import UserError

EVAL = Path(__file__).resolve().parents[2] / "launch" / "eval.py"
# Passages without a search of the policy's own.
_ANSWER_ONLY = ("--config.method=search_r1", "--config.data.template=passages")
METHODS: dict[str, tuple[str, ...]] = {
    "closed book": ("--config.method=r1", "--config.data.template=direct"),
    "retrieve first": (*_ANSWER_ONLY, "--config.rollout.initial_search", "--config.rollout.search_turns=0"),
    "gold passages": (*_ANSWER_ONLY, "--gold_passages"),
    "search_r1": ("--config.method=search_r1",),
    "parallel": ("--config.method=parallel_prompt",),
}
_OWN = (
    "out",
    "model",
    "adapters",
    "gold_passages",
    "config.method",
    "config.rollout.initial_search",
    "config.rollout.search_turns",
)
COLUMNS = (
    "policy",
    "method",
    "benchmark",
    "questions",
    "EM",
    "F1",
    "valid format",
    "searches",
    "turns",
    "model calls",
)
SPLIT = ("parallel split", "sequential split")


def main(argv: Sequence[str]) -> None:
    flags, passed = _flags(argv)
    lines = []
    for name, where in flags.policy.items():
        for method in flags.methods:
            out = flags.out / name / method.replace(" ", "_")
            log(f"{name}, {method}: {out}")
            lines += [{"policy": name, "method": method} | line for line in _evaluated(where, method, passed, out)]
            written(str(flags.out / "methods.json"), {"methods": lines})
    print(_table(lines))


def _evaluated(where: Sequence[str], method: str, passed: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """Calls launch/eval.py once. Returns a line per benchmark."""
    names = [f"--{flag}={value}" for flag, value in zip(("model", "adapters"), where, strict=False)]
    command = [sys.executable, str(EVAL), *names, f"--out={out}", *passed, *METHODS[method]]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"{' '.join(command[1:])}: ended with {done.returncode}, see above")
    benchmarks = json.loads((out / "results.json").read_text(encoding="utf-8"))["benchmarks"]
    return [{"benchmark": name} | _figures(results) for name, results in benchmarks.items()]


def _figures(results: Mapping[str, Any]) -> dict[str, Any]:
    every, kinds = results["all"], results["kinds"]
    line = {
        name: every[name] for name in ("questions", "em", "em_interval", "f1", "valid_format", "searches", "turns")
    }
    line["model_calls"] = every["llm_calls"]
    for kind in ("parallel", "sequential"):
        line[f"split_{kind}"] = kinds.get(kind, {}).get("decomposition_ratio")
        line[f"em_{kind}"] = kinds.get(kind, {}).get("em")
    return line


def _table(lines: Sequence[Mapping[str, Any]]) -> str:
    rows = [[*COLUMNS, *SPLIT]]
    for line in lines:
        low, high = line["em_interval"]
        row = [line["policy"], line["method"], line["benchmark"], str(line["questions"])]
        row += [f"{line['em']:.3f} ({low:.3f} to {high:.3f})", f"{line['f1']:.3f}", f"{line['valid_format']:.2f}"]
        row += [f"{line['searches']:.2f}", f"{line['turns']:.2f}", str(line["model_calls"])]
        shares = (line["split_parallel"], line["split_sequential"])
        rows.append([*row, *("" if share is None else f"{share:.2f}" for share in shares)])
    return table(rows)


def _flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    flags = argparse.ArgumentParser(
        prog="bench methods", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--policy",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "MODEL [ADAPTERS]"),
        help="a name, a model directory, and optionally a PEFT directory of adapters; repeatable",
    )
    flags.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="methods to evaluate")
    flags.add_argument("--out", type=Path, required=True, help="the directory to write to")
    parsed, passed = flags.parse_known_args(argv)
    for policy in parsed.policy:
        if len(policy) not in (2, 3) or not re.fullmatch(r"[\w.-]+", policy[0]):
            flags.error(f"--policy {' '.join(policy)}: accepted: NAME MODEL or NAME MODEL ADAPTERS")
    for flag in passed:
        if flag.lstrip("-").partition("=")[0].removeprefix("no") in _OWN:
            flags.error(f"{flag}: is set by this program")
    parsed.policy = {name: where for name, *where in parsed.policy}
    return parsed, passed
