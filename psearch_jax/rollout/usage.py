"""What rollouts cost, as the host counts it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Usage:
    """What one `collect` cost."""

    slots: int = 0  # of this process
    decode_steps: int = 0  # each of them for all slots
    decoded: int = 0  # ids that this process's slots sampled in them
    yields: int = 0
    prefilled: int = 0  # positions computed by `prefill`, pads included, for all processes
    extended: int = 0  # the same by `extend`
    forced: int = 0  # of these, ids that were appended
    search_s: float = 0.0  # in this process all rows waited for passages
    host_s: float = 0.0  # and for the rest of its work between two programs

    def __add__(self, other: Usage) -> Usage:
        """What both cost, over the same slots."""
        total = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Usage(**total | {"slots": max(self.slots, other.slots)})

    @property
    def row_use(self) -> float:
        """The share of decoded rows that sampled an id."""
        return self.decoded / max(self.decode_steps * self.slots, 1)

    @property
    def extend_use(self) -> float:
        """The share of extended positions that hold an appended id."""
        return self.forced / max(self.extended, 1)

    def metrics(self) -> dict[str, float]:
        """As they stand in metrics.jsonl: `cost/` hangs on slots, mesh and processes, and seconds end in `_s`."""
        shares = {"row_use": self.row_use, "extend_use": self.extend_use}
        counts = {name: getattr(self, name) for name in ("decode_steps", "yields", "prefilled", "extended")}
        costs = {f"cost/{name}": float(value) for name, value in (shares | counts).items()}
        return costs | {"search_s": self.search_s, "host_s": self.host_s}
