"""Several processes, one run: how they start, and how what one knows reaches all.

Every process runs the same device programs with the same arguments. Between two of them each does its own share of the
host's work (its slots, its questions, its searches), and `together` makes what came of it known to all.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from psearch_jax.types import UserError
from retrieval.protocol import CorpusError, RetrievalError

T = TypeVar("T")
HEARTBEAT_S = 20  # a process not heard of for so long is taken for dead, and its run ends
_START_S = 300  # how long a process waits for the others to start
_HEADER = struct.Struct("<Q")
_SMALL, _LARGE = 2**12, 2**24  # bytes of one message: a short one goes at once, a long one in pieces


def start(coordinator: str = "", count: int = 0, index: int = -1, cluster: bool = False) -> None:
    """Joins the other processes of a run; call it before anything else touches a device.

    Args:
      coordinator: `host:port` at which process 0 can be reached.
      count, index: processes in all, and which of them this is.
      cluster: take all three from the environment (TPU pods, Slurm, Kubernetes, Open MPI).

    Raises:
      UserError: some of the three are missing, or the others did not come.
    """
    given = (bool(coordinator), count > 0, index >= 0)
    if not (any(given) or cluster or _tpu_workers() > 1):
        return
    if any(given) and (not all(given) or index >= count):
        raise UserError(
            f"--coordinator={coordinator} --processes={count} --process={index}: accepted: all three, HOST:PORT, the "
            "number of processes, and which of them this is, from 0"
        )
    arguments = {"coordinator_address": coordinator, "num_processes": count, "process_id": index} if all(given) else {}
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=_START_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"--coordinator={coordinator or 'of the cluster'}: the processes did not meet ({reason})"
        ) from None


def _tpu_workers() -> int:
    """Hosts of the TPU slice that this one belongs to, as far as the environment names them."""
    return len([host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host])


def first() -> bool:
    """Whether this process is the one that logs and writes."""
    return jax.process_index() == 0


def on_terminal() -> bool:
    """Whether this process draws its progress on a terminal; else it is logged."""
    return sys.stderr.isatty() and first()


class Lost(RuntimeError):
    """Another process of the run did not come to a collective or a barrier."""


# What jaxlib's collectives and coordination service, and Orbax, write when another process is gone; their types are
# half a dozen, and each of them is also raised for other reasons.
_LOST = re.compile(
    r"\bGloo [\w-]+ failed|\bgloo/transport/|NCCL .*(remote process exited|network error)"
    r"|\bBarrier (timed out|failed)|Timed out while waiting for \w+ barrier|\. Barrier(_| )[iI]d: "
    r"|[cC]oordination service (agent|has (stopped|been shut down)|is (shutting down|not)|encountered)"
    r"|(disconnected from|requested after) coordination service|/xla\.coordination\.|CoordinationService/"
    r"|heartbeat timeout|[Aa]nother task (died|failed)|Heartbeat: Incarnation"
)


def lost(error: BaseException) -> bool:
    """Whether an error says that another process did not come to a collective or a barrier.

    Files and inputs have errors with names in them that the user chose, so these are never asked for words.
    """
    chain: BaseException | None = error
    while chain is not None and jax.process_count() > 1:
        named = isinstance(chain, UserError | CorpusError | RetrievalError)
        named = named or (isinstance(chain, OSError) and chain.errno is not None)
        if isinstance(chain, Lost) or (not named and _LOST.search(str(chain))):
            return True
        chain = chain.__cause__
    return False


def together(work: Callable[[], T]) -> list[T]:
    """Does `work` in every process and returns what each of them found, in their order.

    An exception in one of them is raised in all, so that none goes on alone. All processes must call this at the same
    point; what `work` returns must pickle.
    """
    if jax.process_count() == 1:
        return [work()]
    error: Exception | None = None
    try:
        message = pickle.dumps((True, work()))
    except Exception as raised:  # whatever it is, the others wait to hear of it
        error, message = raised, pickle.dumps((False, _portable(raised)))
    answers = [pickle.loads(answer) for answer in _gather(message)]
    failures = [value for fine, value in answers if not fine]
    if failures:
        raise error or failures[0]
    return [value for _, value in answers]


def all_or_none(work: Callable[[], T]) -> T:
    """What `work` returns in this process, once it is done in every one; for what cannot be sent to the others."""
    done: list[T] = []
    together(lambda: done.append(work()))
    return done[0]


def agreed(work: Callable[[], T]) -> T:
    """What `work` returns in the first process, which alone does it; what it raises there is raised in all."""
    return together(lambda: work() if first() else None)[0]


def in_order(own: Sequence[T], group: int = 1) -> list[T]:
    """Everybody's rows in the order of one process: the groups of `group` rows are dealt out in turn.

    `own` are this process's rows, whose i-th group is the (i * process_count + process_index)-th of all.
    """
    everybody = together(lambda: list(own))
    longest = max(len(rows) for rows in everybody)
    return [row for i in range(0, longest, group) for rows in everybody for row in rows[i : i + group]]


def share(values: Sequence[T]) -> Sequence[T]:
    """This process's part of a list that all have: `in_order` puts the parts together again."""
    return values[jax.process_index() :: jax.process_count()]


def fetch(tree: Any) -> Any:
    """NumPy copies of arrays, wherever they lie. All processes must call it at the same point."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _gather(message: bytes) -> list[bytes]:
    """The message of every process. The first exchange also tells how long each is."""
    head = np.zeros(_SMALL, np.uint8)
    framed = _HEADER.pack(len(message)) + message
    head[: min(len(framed), _SMALL)] = np.frombuffer(framed[:_SMALL], np.uint8)
    heads = [bytes(row) for row in multihost_utils.process_allgather(head)]
    lengths = [_HEADER.unpack(row[: _HEADER.size])[0] for row in heads]
    parts = [[row[_HEADER.size :]] for row in heads]
    done, longest = _SMALL - _HEADER.size, max(lengths)
    while done < longest:
        size = min(_LARGE, 1 << (longest - done - 1).bit_length())  # few sizes: each is a program of its own
        piece = np.zeros(size, np.uint8)
        rest = message[done : done + size]
        piece[: len(rest)] = np.frombuffer(rest, np.uint8)
        for part, row in zip(parts, multihost_utils.process_allgather(piece), strict=True):
            part.append(bytes(row))
        done += size
    return [b"".join(part)[:length] for part, length in zip(parts, lengths, strict=True)]


def _portable(error: Exception) -> Exception:
    """The error as the other processes get it: with the place where it happened, if it carries but a message."""
    where = f"process {jax.process_index()} of {jax.process_count()}"
    if len(error.args) == 1 and isinstance(error.args[0], str):
        try:
            return pickle.loads(pickle.dumps(type(error)(f"{where}: {error.args[0]}")))
        except Exception:  # a class that cannot be made again
            pass
    if isinstance(error, OSError) and error.errno is not None:  # of a file, as is its name
        return OSError(error.errno, f"{where}: {error.strerror}", error.filename)
    return RuntimeError(f"{where}: {type(error).__name__}: {error}")
