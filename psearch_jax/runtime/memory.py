"""How much memory a process can still allocate."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# Files of control groups, version 2 and then 1: the limit, the use, the statistics, and the name of the statistic that
# counts reclaimable memory (file pages not used recently).
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Bytes that this process can still allocate: the machine's available memory, or less in a container."""
    amounts = []
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else ():
        if line.startswith("MemAvailable:"):
            amounts.append(1024 * int(line.split()[1]))
    for limit, use, stat, name in _LIMITS:
        try:
            left = int((cgroup / limit).read_text()) - int((cgroup / use).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        lines = (cgroup / stat).read_text().splitlines() if (cgroup / stat).is_file() else ()
        amounts.append(left + sum(int(line.split()[1]) for line in lines if line.split()[0] == name))
    if not amounts:  # not Linux and no container: the machine's memory
        amounts.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return max(0, min(amounts))
