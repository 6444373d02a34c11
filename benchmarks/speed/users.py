"""`launch/bench.py users`: many concurrent users of launch/serve_agent.py, whose answers must not affect each other.

    python launch/bench.py users                          the toy policy and questions of its closed world
    python launch/bench.py users --model=DIR --index=INDEX --questions=FILE --users=16 --slots=8

It starts a server, and first sends every request on its own, greedy and sampled with a seed. Then --users users send
requests for --seconds seconds, each one after another; half of the users stream. Text, searches and answers must equal
those of the requests on their own. The server gets all flags that this program does not define, such as --index and
--config.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from benchmarks.speed.timing import log, machine, written
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.data.sources import read_questions
from psearch_jax.eval.tables import table
from psearch_jax.types import UserError

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("parallel", "sequential", "single")
Asked = dict[str, Any]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench users", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="toy", help="as for launch/serve_agent.py")
    parser.add_argument("--questions", help="question file; default: the closed world's")
    parser.add_argument("--users", type=int, default=200, help="concurrent users")
    parser.add_argument("--seconds", type=float, default=120, help="how long they send requests")
    parser.add_argument("--slots", type=int, default=32, help="as for launch/serve_agent.py")
    parser.add_argument("--count", type=int, default=60, help="questions, each asked greedily and sampled")
    parser.add_argument("--json", help="file for the figures")
    flags, passed = parser.parse_known_args(argv)
    asked = [
        {"messages": [{"role": "user", "content": text}], "temperature": temperature, "seed": i}
        for i, text in enumerate(_texts(flags.questions, flags.count))
        for temperature in (0.0, 1.0)
    ]
    with served(flags.model, flags.slots, flags.users, passed) as url:
        pool = urllib3.PoolManager(maxsize=flags.users + 1, block=False, retries=False)
        log(f"{len(asked)} requests one at a time")
        started = time.perf_counter()
        expected = [response(pool, url, one, stream=False) for one in asked]
        single_s = (time.perf_counter() - started) / len(asked)
        log(f"{flags.users} users for {flags.seconds:g} s")
        started = time.perf_counter()
        figures = answer_concurrently(pool, url, asked, expected, flags.users, flags.seconds)
        lasted = time.perf_counter() - started  # includes waiting for requests in flight at the end
    seconds = np.array(figures["seconds"] or [np.nan])
    rows = [
        ["answered", str(len(figures["seconds"]))],
        ["identical to the single request", str(figures["outcomes"]["identical"])],
        ["different", str(figures["outcomes"]["different"])],
        ["refused or failed", str(figures["outcomes"]["failed"])],
        ["answers per second", f"{len(figures['seconds']) / lasted:.3g}"],
        ["answers per second, one at a time", f"{1 / single_s:.3g}"],
        *([f"seconds, {p}% at most", f"{np.percentile(seconds, p):.2f}"] for p in (50, 95, 99, 100)),
        ["answers per user, minimum and maximum", f"{min(figures['by_user'])} and {max(figures['by_user'])}"],
    ]
    print(table([["", f"{flags.users} users, {flags.slots} slots, {flags.seconds:g} s"], *rows]))
    measured = {"single_s": single_s, "lasted_s": lasted, **figures}
    written(flags.json, {"machine": machine(), "flags": vars(flags), **measured})
    wrong = figures["outcomes"]["different"] + figures["outcomes"]["failed"]
    if wrong:
        raise UserError(f"{wrong} answers differ from those of single requests; the first: {figures['first'][:400]}")


def _texts(file: str | None, count: int) -> list[str]:
    """The first questions of the file, or of the closed world, kinds in turn."""
    if file:
        return [question.text for question in read_questions(file)[:count]]
    world, each = ClosedWorld.make(0), math.ceil(count / len(KINDS))
    kinds = (questions(world, "eval", kind, each, 3) for kind in KINDS)
    return [question.text for one_each in zip(*kinds, strict=True) for question in one_each][:count]


@contextmanager
def served(model: str, slots: int, users: int, passed: Sequence[str]) -> Iterator[str]:
    """Starts a server with the flags `passed`, and yields its address."""
    command = [sys.executable, ROOT / "launch" / "serve_agent.py", f"--model={model}", f"--slots={slots}", "--port=0"]
    # Without a cache: the concurrent requests are those that were made one at a time before.
    command += ["--config.retrieval.cache_mb=0", *passed]
    # 2 * users: a stream holds its place for a moment after its end, when its user already sends the next request.
    server = subprocess.Popen([*command, f"--requests={2 * users}"], stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        if not line:
            raise UserError(f"launch/serve_agent.py ended with code {server.wait()}; see above")
        yield line.rsplit(" ", 1)[1].strip().rstrip("/") + "/v1/chat/completions"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        finally:
            server.kill()
            server.stdout.close()


def response(pool: urllib3.PoolManager, url: str, asked: Asked, stream: bool) -> tuple[str, ...]:
    """Reasoning, answer and searches of one request. Raises `UserError` for a refusal."""
    answer = pool.request("POST", url, body=json.dumps({**asked, "stream": stream}), timeout=600)
    if answer.status != 200:
        raise UserError(f"status {answer.status}: {answer.data[:200]!r}")
    if not stream:
        completion = json.loads(answer.data)
        message, searched = completion["choices"][0]["message"], completion["psearch"]
        return message["reasoning_content"], message["content"], _searched(searched)
    events = [line.removeprefix("data: ") for line in answer.data.decode().split("\n\n") if line]
    if events[-1] != "[DONE]" or '"error"' in events[-2]:
        raise UserError(f"a stream that ends with {events[-2:]}")
    chunks = [json.loads(event) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = ("".join(delta.get(name, "") for delta in deltas) for name in ("reasoning_content", "content"))
    return (*parts, _searched(chunks[-1]["psearch"]))


def _searched(details: dict[str, Any]) -> str:
    """Queries and passages of every turn."""
    return json.dumps([(turn["queries"], turn["passages"]) for turn in details["turns"]])


def answer_concurrently(
    pool: urllib3.PoolManager,
    url: str,
    asked: list[Asked],
    expected: list[tuple[str, ...]],
    users: int,
    seconds: float,
) -> dict[str, Any]:
    """Lets `users` users send requests for `seconds`, and counts the answers that equal those in `expected`."""
    outcomes: Counter[str] = Counter({"identical": 0, "different": 0, "failed": 0})
    took: list[float] = []
    by_user, first, lock = [0] * users, [""], threading.Lock()
    end = time.perf_counter() + seconds

    def use(user: int) -> None:
        order = np.random.default_rng(user).permutation(len(asked))
        for i in itertools.cycle(order):
            started = time.perf_counter()
            if started > end:
                return
            try:
                got = response(pool, url, asked[i], stream=bool(user % 2))
                outcome = "identical" if got == expected[i] else "different"
                difference = f"{asked[i]}: expected {expected[i]}, got {got}" if outcome == "different" else ""
            except (UserError, urllib3.exceptions.HTTPError, ValueError, LookupError) as error:
                outcome, difference = "failed", f"{type(error).__name__}: {error}"
            with lock:
                outcomes[outcome] += 1
                first[0] = first[0] or difference
                if outcome != "failed":
                    took.append(time.perf_counter() - started)
                    by_user[user] += 1

    threads = [threading.Thread(target=use, args=(user,)) for user in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"outcomes": dict(outcomes), "seconds": took, "by_user": by_user, "first": first[0]}
