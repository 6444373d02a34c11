"""`launch/bench.py latency`: the wall-clock time and the retriever calls that splitting saves.

Two policies answer the same closed-world questions greedily: one that searches one by one (the cold start), and one
that has learned to split. Questions need one fact, where splitting saves nothing, or compare two to four. The
retriever is in process or served over HTTP on this machine, with a delay added to every call to imitate a distant or
large index. Questions are asked one at a time, or many in one batch. The policies alternate, question by question, so
that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed.timing import log, machine, written
from configs.smoke import get_config
from psearch_jax.assembly import build
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.config import from_mapping
from psearch_jax.eval.evaluate import evaluate
from psearch_jax.eval.scores import Score, score
from psearch_jax.eval.tables import share, table
from psearch_jax.runtime import cli
from psearch_jax.runtime.metrics import mean, spread
from psearch_jax.types import Question
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index
from retrieval.protocol import Passage, Retriever
from retrieval.remote.client import HttpRetriever

ROOT = Path(__file__).resolve().parents[2]
DELAYS = (0, 50, 200, 1000)  # milliseconds
REPEATS = 3  # of the batch of questions
FACTS = (1, 2, 3, 4)  # independent facts that a question needs


class Delayed:
    """A retriever that delays every call by `delay_ms` and counts the calls."""

    def __init__(self, retriever: Retriever, delay_ms: int):
        self._retriever, self._delay_ms, self.calls = retriever, delay_ms, 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """As `Retriever.search`."""
        self.calls += 1
        time.sleep(self._delay_ms / 1000)
        return self._retriever.search(queries, k)

    def describe(self) -> dict[str, Any]:
        """As `Retriever.describe`."""
        return self._retriever.describe()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench latency", description=__doc__)
    parser.add_argument(
        "--one_by_one", default="toy", help="policy that searches one by one; as --model of launch/eval.py"
    )
    parser.add_argument("--parallel", required=True, help="policy that splits: a run of `make demo`")
    parser.add_argument("--count", type=int, default=8, help="questions per number of facts, asked one at a time")
    parser.add_argument("--delays", type=int, nargs="+", default=list(DELAYS), help="milliseconds added to every call")
    parser.add_argument("--batch_questions", type=int, default=64, help="questions asked in one batch")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    cli.configure_jax()
    world = ClosedWorld.make(0)
    compared = questions(world, "eval", "parallel", 8 * flags.count + flags.batch_questions, 1)
    singles = questions(world, "eval", "single", flags.count, 1)
    for facts in FACTS[1:]:
        singles += [q for q in compared if _facts(q) == facts][: flags.count]
    policies = {"one by one": flags.one_by_one, "parallel": flags.parallel}
    lines = []
    with served(world) as url:
        for slots, groups in (
            (1, [[q] for q in singles]),
            (flags.batch_questions, [compared[: flags.batch_questions]] * REPEATS),
        ):
            engines = {name: _engine(model, slots) for name, model in policies.items()}
            for place in ("in process", "HTTP"):
                for delay in flags.delays:
                    lines.append(_measured(engines, groups, place, url, delay, slots))
                    log(f"{lines[-1]}")
    written(flags.json, {"machine": machine(), "arguments": vars(flags), "lines": lines})
    print(tabled(lines), by_facts(lines), sep="\n\n")


@contextmanager
def served(world: ClosedWorld) -> Iterator[str]:
    """The address of a retrieval server of the world's passages, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(f"{folder}/corpus.jsonl", world.passages)
        corpus = MemoryMappedCorpus(f"{folder}/corpus.jsonl")
        build_index(f"{folder}/index", corpus, HashingEncoder().fit(corpus))
        command = [sys.executable, str(ROOT / "launch" / "serve_retriever.py"), f"--index={folder}/index", "--port=0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                yield server.stdout.readline().split()[-1]
            finally:
                server.terminate()


def _engine(model: str, slots: int) -> tuple[Any, Any]:
    """A collector and the weights of its policy, with every shape compiled."""
    config = from_mapping(get_config().to_dict())
    parts = build.from_path(replace(config, rollout=replace(config.rollout, slots=slots, samples=1)), model)
    weights = parts.sampling_weights()
    parts.collector.warm_up(weights)
    return parts.collector, weights


def _measured(
    engines: dict[str, tuple[Any, Any]],
    groups: Sequence[Sequence[Question]],
    place: str,
    url: str,
    delay: int,
    batch: int,
) -> dict[str, Any]:
    """Median seconds per group, turns, calls and EM of each policy, which answer every group alternately."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    calls: dict[str, list[int]] = {name: [] for name in engines}
    scores: dict[str, list[list[Score]]] = {name: [] for name in engines}
    asking = {
        name: collector.with_retriever(HttpRetriever([url]) if place == "HTTP" else collector.retriever)
        for name, (collector, _) in engines.items()
    }
    for collector, (_, weights) in zip(asking.values(), engines.values(), strict=True):
        evaluate(collector, weights, groups[0], seed=0, step=0, temperature=0.0)  # connects; not measured
    for group in groups:
        for name, (_, weights) in engines.items():
            retriever = Delayed(asking[name].retriever, delay)
            collector = asking[name].with_retriever(retriever)
            start = time.perf_counter()
            rolled = evaluate(collector, weights, group, seed=0, step=0, temperature=0.0)
            seconds[name].append(time.perf_counter() - start)
            calls[name].append(retriever.calls)
            scores[name].append(list(map(score, rolled)))
    line: dict[str, Any] = {"place": place, "added_ms": delay, "batch": batch}
    compared = [i for i, group in enumerate(groups) if _facts(group[0]) > 1]
    for name in engines:
        compared_scores = [one for i in compared for one in scores[name][i]]
        line[name] = {
            "seconds": round(statistics.median(seconds[name][i] for i in compared), 4),
            "turns": round(mean(one.turns for one in compared_scores), 3),
            "calls": round(mean(calls[name][i] for i in compared), 3),
            "em": round(mean(one.em for one in compared_scores), 3),
        }
    slow, fast = engines
    faster = [a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)]
    line["faster"] = [round(x, 3) for x in spread([faster[i] for i in compared])]
    if batch == 1:
        own = {n: [x for x, group in zip(faster, groups, strict=True) if _facts(group[0]) == n] for n in FACTS}
        line["faster_by_facts"] = {n: [round(x, 3) for x in spread(ratios)] for n, ratios in own.items()}
    return line


def _facts(question: Question) -> int:
    """How many facts can be looked up in one round."""
    return max(map(len, question.metadata["rounds"]))


def tabled(lines: Sequence[dict[str, Any]]) -> str:
    """Seconds of both policies, the speed-up, and the shares of time and of retriever calls saved.

    The 95% intervals are over questions, or over repeats for batches.
    """
    head = ["retriever", "added ms", "batch", "one by one, s", "parallel, s", "speedup", "95% interval", "time saved"]
    rows = [[*head, "calls saved", "turns", "EM"]]
    for line in lines:
        slow, fast = line["one by one"], line["parallel"]
        centre, low, high = line["faster"]
        rows.append(
            [
                line["place"],
                str(line["added_ms"]),
                str(line["batch"]),
                f"{slow['seconds']:.3f}",
                f"{fast['seconds']:.3f}",
                f"{centre:.2f}",
                f"{low:.2f}-{high:.2f}" if low != high else "",
                share(1 - fast["seconds"] / slow["seconds"]),
                share(1 - fast["calls"] / slow["calls"]),
                f"{slow['turns']:.2f}, {fast['turns']:.2f}",
                f"{share(slow['em'])}, {share(fast['em'])}",
            ]
        )
    return table(rows)


def by_facts(lines: Sequence[dict[str, Any]]) -> str:
    """The speed-up by number of facts, for questions asked one at a time, with 95% intervals over questions."""
    rows = [["retriever", "added ms", *(f"{n} fact{'s' * (n > 1)}" for n in FACTS)]]
    for line in lines:
        if "faster_by_facts" in line:
            cells = [f"{c:.2f} ({low:.2f}-{high:.2f})" for c, low, high in line["faster_by_facts"].values()]
            rows.append([line["place"], str(line["added_ms"]), *cells])
    return table(rows)
