"""One of several processes that exchange host data; runtime/test_processes.py starts them and reads their output.

python tests/support/several_processes.py HOST:PORT COUNT INDEX DIRECTORY
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import jax
import numpy as np
from helpers import random_params, tiny_config
from jax.sharding import NamedSharding, PartitionSpec

from psearch_jax.runtime import processes
from psearch_jax.sharding import put
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.train.checkpointing.best import Best, find_best
from psearch_jax.train.checkpointing.preemption import Interrupted, StopRequest
from psearch_jax.types import UserError
from retrieval.protocol import RetrievalError


class Odd(Exception):
    """An error that does not pickle."""

    def __init__(self, one: int, two: int):
        super().__init__(f"{one} {two}")


BARRIER = "Barrier timed out. Id: orbax:9. This usually happens because a task triggered the barrier too early"
# LOST: what jaxlib and Orbax raised when another process was killed. NOT_LOST: what only looks similar.
LOST = (
    jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {BARRIER}"),
    jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed: [gloo/transport/tcp/pair.cc:547] closed by peer"),
    ValueError("UNKNOWN: Gloo all-gather failed: Connection reset by peer"),
    jax.errors.JaxRuntimeError("UNAVAILABLE: The following tasks have a heartbeat timeout: task 1"),
    TimeoutError("Timed out while waiting for async_write_complete barrier."),
    processes.LostProcess("saving a checkpoint"),
)
NOT_LOST = (
    OSError(28, "No space left on device", "/runs/Barrier timed out/checkpoints"),
    FileNotFoundError(2, "No such file or directory", "/data/carrier-heartbeat timeout.jsonl"),
    TimeoutError(110, "Connection timed out", "/nfs/index"),
    UserError("--benchmark: Another task failed found"),
    RetrievalError("the server said: Barrier failed because: ill"),
    ValueError("a barrier of 3 and a carrier of 4"),
    KeyError("Gloo"),
)


def failing(index: int, error: Exception, by=processes.allgather) -> str:
    def work() -> None:
        if here == index:
            raise error

    try:
        by(work)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing was raised"


def stopped(index: int) -> tuple[int, int]:
    """Calls the check until all learn that process `index` was to stop at its fourth call: (calls, exchanges)."""
    request, allgather, exchanges = StopRequest(), processes.allgather, []
    processes.allgather = lambda work: exchanges.append(1) or allgather(work)
    look = request.checker()
    for calls in range(1, 1000):
        request.arrived = here == index and calls >= 4
        try:
            look()
        except Interrupted:
            processes.allgather = allgather
            return calls, len(exchanges)
        time.sleep(0.02)
    return 1000, len(exchanges)


def one_reads_badly(folder: Path, mesh: jax.sharding.Mesh) -> dict:
    """A checkpoint that all processes wrote is intact for process 0 and damaged for process 1."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    config = tiny_config(8)

    def place(tree):
        return jax.tree.map(lambda _: everywhere, tree)

    best = Best(folder, "em", "these")
    loop = {"model": checkpoint.model_record(config), "tokenizer": "x"}
    best.offer(3, 0.5, put(random_params(config), everywhere), loop)
    best.close()
    own = folder / f"of {here}" / "run"

    def copy() -> None:
        shutil.copytree(find_best(folder), own / "3")
        if here == 1:
            (own / "3" / "params" / "manifest.ocdbt").unlink()

    processes.allgather(copy)
    read = checkpoint.load_params(find_best(folder), place)[2]["best"]
    start = time.monotonic()
    try:
        os.chdir(own.parent)  # the same relative path in both, but different files
        checkpoint.load_params("run", place)
        text = "nothing was raised"
    except UserError as error:
        text = str(error)
    return {"best": read, "record": Best(folder, "em", "these").record, "said": text, "took": time.monotonic() - start}


if __name__ == "__main__":
    coordinator, count, here = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    processes.start(coordinator, count, here)
    mesh = jax.make_mesh((jax.device_count(),), ("all",), devices=jax.devices())
    place = NamedSharding(mesh, PartitionSpec("all"))
    spread = put(np.arange(6), place)
    # Other values than the other process has; processes that compared them would refuse them.
    alone = put(np.array([here]), NamedSharding(mesh, PartitionSpec()))
    rows = list(range(11))
    long = {"process": here, "text": "x" * (20_000_000 * here + 3)}  # longer than one exchange can carry
    results = {
        "first": processes.first(),
        "agreed": processes.broadcast(lambda: f"of {here}"),
        "unreadable": failing(0, OSError(5, "Input/output error", "before.json"), processes.broadcast),
        "lost": [processes.is_lost(error) for error in LOST],
        "not lost": [processes.is_lost(error) for error in NOT_LOST],
        "order": processes.in_order(processes.share(rows)),
        "groups": processes.in_order([f"{q}{s}" for q in processes.share("abcde") for s in "12"], group=2),
        "long": [(m["process"], len(m["text"])) for m in processes.allgather(lambda: long)],
        "none": processes.allgather(lambda: None),
        "search": failing(1, RetrievalError("the server is gone")),
        "input": failing(0, UserError("found 3")),
        "odd": failing(1, Odd(1, 2)),
        "stopped": stopped(1),
        "damaged": one_reads_badly(Path(sys.argv[4]), mesh),
        "array": processes.fetch(spread).tolist(),
        "not compared": [shard.data.tolist() for shard in alone.addressable_shards],
    }
    print("FOUND " + json.dumps(results), flush=True)
