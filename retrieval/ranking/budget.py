"""The memory and disk that an index build needs, estimated before it starts, and disk space reserved for files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from retrieval.ranking.index import TreeSettings, training_rows, tree_bytes

# ScaNN's build holds two copies of the vectors, in addition to those that train the partitions. Measured as the growth
# of anonymous memory over a memory-mapped input, in multiples of the float bytes: 2.05 (docs/performance.md).
COPIES = 2.05
SPARE_BYTES = 2**28  # the program itself and its blocks
SHARE = 0.8  # of the available memory that a build plans to use: other programs need some too


def peak_bytes(rows: int, dimensions: int, leaves: int) -> int:
    """The memory at the peak of building a tree of `leaves` partitions over [rows, dimensions] float32."""
    return int(4 * dimensions * (COPIES * rows + training_rows(rows, leaves))) + SPARE_BYTES


def disk_bytes(rows: int, dimensions: int, tree: TreeSettings | None) -> int:
    """The disk space of the vectors and the tree of one shard."""
    return 4 * rows * dimensions + (tree_bytes(rows, dimensions, tree) if tree else 0)


def reserve(path: Path, size: int) -> None:
    """Make the file `path` `size` bytes long and allocate all of its blocks; its content stays.

    Without that, writing to a memory-mapped hole on a full disk kills the process (SIGBUS).
    Raises `OSError` when there is not enough space; the file then keeps its length.
    """
    with open(path, "r+b" if path.exists() else "w+b") as file:
        before = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            os.ftruncate(file.fileno(), before)
            if error.errno != errno.ENOSPC:
                raise
            free = shutil.disk_usage(path.parent).free
            message = f"{path.name} takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            raise OSError(errno.ENOSPC, message) from None
        os.ftruncate(file.fileno(), size)
