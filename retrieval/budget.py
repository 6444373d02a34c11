"""What a build needs of memory and disk, said before it starts: how many shards, how high a peak, room kept free."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from retrieval.index import TreeSettings, training_rows, tree_bytes

# ScaNN's build holds the vectors twice, beside those that the partitions are found from. Measured as the growth of
# anonymous memory over a memory-mapped input, in multiples of the float bytes: 2.05 (docs/performance.md).
COPIES = 2.05
SPARE_BYTES = 2**28  # the program itself and its blocks
SHARE = 0.8  # of the available memory that a build plans to use: others run on the machine as well


def peak_bytes(rows: int, dimensions: int, leaves: int) -> int:
    """The memory at the peak of building a tree of `leaves` partitions over [rows, dimensions] float32."""
    return int(4 * dimensions * (COPIES * rows + training_rows(rows, leaves))) + SPARE_BYTES


def disk_bytes(rows: int, dimensions: int, tree: TreeSettings | None) -> int:
    """What the vectors and the tree of an index of one shard take on disk."""
    return 4 * rows * dimensions + (tree_bytes(rows, dimensions, tree) if tree else 0)


def reserve(path: Path, size: int) -> None:
    """Make the file `path` `size` bytes long, with all of its blocks on disk; what it holds stays.

    A memory map over a file with holes ends in a signal (SIGBUS) when a block is written and the disk is full.
    Raises `OSError` when there is no room; the file is then as long as before.
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
