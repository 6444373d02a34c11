"""The cost of rollouts, as counted by the host."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Usage:
    """The cost of one `collect` call."""

    slots: int = 0  # of this process
    decode_steps: int = 0  # each for all slots
    row_steps: int = 0  # sum over this process's slots of the steps in which the row was running
    yields: int = 0
    prefilled: int = 0  # positions computed by `prefill`, pads included, for all processes
    extended: int = 0  # positions computed by `extend`, likewise
    refreshed: int = 0  # positions computed again with newer weights, likewise
    forced: int = 0  # of the extended ones, appended tokens
    search_s: float = 0.0  # time in which this process waited for passages, and all rows with it
    host_s: float = 0.0  # time in which this process parsed turns and prepared what follows them

    def __add__(self, other: Usage) -> Usage:
        """The sum of both costs, over the same slots."""
        total = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Usage(**total | {"slots": max(self.slots, other.slots)})

    @property
    def row_use(self) -> float:
        """The share of decoded rows that were running."""
        return self.row_steps / max(self.decode_steps * self.slots, 1)

    @property
    def extend_use(self) -> float:
        """The share of extended positions that hold an appended token."""
        return self.forced / max(self.extended, 1)

    def metrics(self) -> dict[str, float]:
        """Values for metrics.jsonl: those in `cost/` depend on slots, mesh and processes; `_s` marks seconds."""
        shares = {"row_use": self.row_use, "extend_use": self.extend_use}
        counts = {name: getattr(self, name) for name in ("decode_steps", "yields", "prefilled", "extended")}
        counts |= {"refreshed": self.refreshed} if self.refreshed else {}
        costs = {f"cost/{name}": float(value) for name, value in (shares | counts).items()}
        return costs | {"search_s": self.search_s, "host_s": self.host_s}
