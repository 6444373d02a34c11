"""One of several processes that exchange what they know; test_processes.py starts them and reads what they print.

python tests/several_processes.py HOST:PORT COUNT INDEX
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from psearch_jax import processes
from psearch_jax.types import UserError
from retrieval.protocol import RetrievalError


class Odd(Exception):
    """An error that does not pickle."""

    def __init__(self, one: int, two: int):
        super().__init__(f"{one} {two}")


def failing(index: int, error: Exception) -> str:
    def work() -> None:
        if here == index:
            raise error

    try:
        processes.together(work)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing was raised"


if __name__ == "__main__":
    coordinator, count, here = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    processes.start(coordinator, count, here)
    mesh = jax.make_mesh((count,), ("all",), devices=jax.devices())
    place = NamedSharding(mesh, PartitionSpec("all"))
    spread = jax.make_array_from_callback((4,), place, lambda index: np.arange(4)[index])
    rows = list(range(11))
    long = {"process": here, "text": "x" * (20_000_000 * here + 3)}  # longer than one message may be
    found = {
        "first": processes.first(),
        "agreed": processes.agreed(f"of {here}"),
        "order": processes.in_order(processes.share(rows)),
        "groups": processes.in_order([f"{q}{s}" for q in processes.share("abcde") for s in "12"], group=2),
        "long": [(m["process"], len(m["text"])) for m in processes.together(lambda: long)],
        "none": processes.together(lambda: None),
        "search": failing(1, RetrievalError("the server is gone")),
        "input": failing(0, UserError("found 3")),
        "odd": failing(1, Odd(1, 2)),
        "array": processes.fetch(spread).tolist(),
    }
    print("FOUND " + json.dumps(found), flush=True)
