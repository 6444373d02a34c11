"""Runs of several processes: how they start, and how they exchange host data.

Every process runs the same device programs with the same arguments. Between two programs, each process does its share
of the host work (its slots, its questions, its searches), and `allgather` sends the results to all processes.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from psearch_jax.types import UserError
from retrieval.protocol import CorpusError, RetrievalError

T = TypeVar("T")
HEARTBEAT_S = 20  # after this time without a heartbeat a process counts as dead, and the run ends
_START_S = 300  # how long a process waits for the others to start


def start(coordinator: str = "", count: int = 0, index: int = -1, cluster: bool = False) -> None:
    """Joins the other processes of a run; call it before the first use of a device.

    Args:
      coordinator: `host:port` of process 0.
      count, index: the number of processes, and the index of this one.
      cluster: take all three from the environment (TPU pods, Slurm, Kubernetes, Open MPI).

    Raises:
      UserError: only some of the three are set, or the other processes did not join.
    """
    parts = (bool(coordinator), count > 0, index >= 0)
    if not (any(parts) or cluster or _tpu_workers() > 1):
        return
    if any(parts) and (not all(parts) or index >= count):
        raise UserError(
            f"--coordinator={coordinator} --processes={count} --process={index}: accepted: all three, HOST:PORT, the "
            "number of processes, and the index of this one, from 0"
        )
    # JAX's own handler of SIGTERM only notes the signal: while it is installed, nothing would end this process before
    # training begins, nor an evaluation at all.
    jax.config.update("jax_enable_preemption_service", False)
    arguments = {"coordinator_address": coordinator, "num_processes": count, "process_id": index} if all(parts) else {}
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
    """Number of hosts of this host's TPU slice, by the environment; 0 if it names none."""
    return len([host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host])


def first() -> bool:
    """Whether this is process 0, which logs and writes files."""
    return jax.process_index() == 0


def on_terminal() -> bool:
    """Whether this process shows its progress on a terminal; otherwise progress is logged."""
    return sys.stderr.isatty() and first()


class LostProcess(RuntimeError):
    """Another process of the run did not reach a collective or a barrier."""


# Messages of jaxlib's collectives and coordination service, and of Orbax, when another process is gone. The exception
# types do not identify this case: there are half a dozen, and each is also raised for other reasons.
_LOST = re.compile(
    r"\bGloo [\w-]+ failed|\bgloo/transport/|NCCL .*(remote process exited|network error)"
    r"|\bBarrier (timed out|failed)|Timed out while waiting for \w+ barrier|\. Barrier(_| )[iI]d: "
    r"|[cC]oordination service (agent|has (stopped|been shut down)|is (shutting down|not)|encountered)"
    r"|(disconnected from|requested after) coordination service|/xla\.coordination\.|CoordinationService/"
    r"|heartbeat timeout|[Aa]nother task (died|failed)|Heartbeat: Incarnation"
)


def is_lost(error: BaseException) -> bool:
    """Whether an error means that another process did not reach a collective or a barrier.

    Errors about files and inputs contain names that the user chose, so their text is not searched.
    """
    chain: BaseException | None = error
    while chain is not None and jax.process_count() > 1:
        has_user_text = isinstance(chain, UserError | CorpusError | RetrievalError)
        has_user_text = has_user_text or (isinstance(chain, OSError) and chain.errno is not None)
        if isinstance(chain, LostProcess) or (not has_user_text and _LOST.search(str(chain))):
            return True
        chain = chain.__cause__
    return False


def allgather(work: Callable[[], T]) -> list[T]:
    """Runs `work` in every process and returns the results of all processes, in process order.

    An exception in one process is raised in all, so that none continues on its own. All processes must call this at
    the same point, and the results must be picklable.
    """
    if jax.process_count() == 1:
        return [work()]
    error: Exception | None = None
    try:
        message = pickle.dumps((True, work()))
    except Exception as raised:  # of any type, because the other processes wait for this message
        error, message = raised, pickle.dumps((False, _portable(raised)))
    answers = [pickle.loads(answer) for answer in _gather(message)]
    for process, (succeeded, value) in enumerate(answers):
        if not succeeded:  # the first error, the same in all processes
            raise error if error and process == jax.process_index() else value
    return [value for _, value in answers]


def all_or_none(work: Callable[[], T]) -> T:
    """Runs `work` in every process and returns this process's result, which need not be picklable."""
    done: list[T] = []
    allgather(lambda: done.append(work()))
    return done[0]


def broadcast(work: Callable[[], T]) -> T:
    """Runs `work` in process 0 only and returns its result in all processes; an exception is raised in all."""
    return cast(T, allgather(lambda: work() if first() else None)[0])


def in_order(rows: Sequence[T], group: int = 1) -> list[T]:
    """The rows of all processes, in the order that a single process would have.

    `rows` are those of this process. Their i-th group of `group` rows is group i * process_count + process_index of
    the result.
    """
    parts = allgather(lambda: list(rows))
    longest = max(map(len, parts))
    return [row for i in range(0, longest, group) for part in parts for row in part[i : i + group]]


def share(values: Sequence[T]) -> Sequence[T]:
    """This process's part of a list that all processes have; `in_order` is the inverse."""
    return values[jax.process_index() :: jax.process_count()]


def fetch(tree: Any) -> Any:
    """NumPy copies of complete arrays, however they are sharded. All processes must call it at the same point."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _gather(message: bytes) -> list[bytes]:
    """The messages of all processes, padded to one of few lengths, because each length compiles a program."""
    lengths = multihost_utils.process_allgather(np.array(len(message)))
    padded = np.zeros(max(2**12, 1 << int(lengths.max() - 1).bit_length()), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def _portable(error: Exception) -> Exception:
    """The error for the other processes, with the process in which it happened."""
    where = f"process {jax.process_index()} of {jax.process_count()}"
    if len(error.args) == 1 and isinstance(error.args[0], str):
        try:
            return pickle.loads(pickle.dumps(type(error)(f"{where}: {error.args[0]}")))
        except Exception:  # a class that cannot be constructed or pickled like this
            pass
    if isinstance(error, OSError) and error.errno is not None:  # keep errno and file name
        return OSError(error.errno, f"{where}: {error.strerror}", error.filename)
    return RuntimeError(f"{where}: {type(error).__name__}: {error}")
