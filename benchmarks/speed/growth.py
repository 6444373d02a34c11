"""How the time of rollouts grows with the number of rows, of turns, and of positions that every token attends to."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.scripted import Ours, Script, Work
from benchmarks.speed.timing import SIZES, log, run_alternately
from psearch_jax.models import decoder
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.types import UserError

GROWTH = {"rows": (8, 32, 128, 512), "turns": (1, 2, 3, 4), "prompt": (512, 1024, 2048, 4096, 8192)}


def growth(size: str, scale: float, repeats: int, settings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of our rollouts as rows, turns or prompt length grow.

    `relative_to_linear` is the time relative to linear growth from the first value. It is below 1 where fixed costs
    are shared, and above 1 where work grows faster than linearly, as attention does.
    """
    model = SIZES[size]
    params = decoder.init_params(model, 0)

    def work(rows: int = 32, turns: int = 1, prompt: int = 160) -> Work:
        ids, prompt = (max(3, round(n * scale)) for n in (60, prompt))
        return Work("growth", prompt, 8, rows, (Script((ids,) * turns, (ids,) * (turns - 1)),) * rows)

    lines = []
    for axis, values in GROWTH.items():
        for value in values:
            ours = Ours(work(**{axis: value}), model, params, settings, 0.0)
            taken = run_alternately({f"{axis} {value}": ours.run}, repeats, log)[f"{axis} {value}"]
            median = float(np.median(taken))
            if value == values[0]:
                unit = median / value
            line = {"size": size, "grows": axis, "value": value, "seconds": round(median, 3)}
            line |= {"min": round(min(taken), 3), "max": round(max(taken), 3)}
            lines.append(line | {"relative_to_linear": round(median / value / unit, 2)})
    return lines


def plot(lines: Sequence[Mapping[str, Any]], path: str) -> None:
    """Plots the lines of `growth`: for each size and axis the median, the spread, and linear growth.

    Raises:
      UserError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError(f"--figure={path}: matplotlib is not installed (pip install -e .[bench])") from None
    kinds = list(dict.fromkeys((line["size"], line["grows"]) for line in lines))
    figure, axes = plt.subplots(1, len(kinds), figsize=(3.2 * len(kinds), 3), layout="constrained", squeeze=False)
    for (size, grows), ax in zip(kinds, axes[0], strict=True):
        mine = [line for line in lines if (line["size"], line["grows"]) == (size, grows)]
        values, seconds, low, high = (
            np.array([line[key] for line in mine]) for key in ("value", "seconds", "min", "max")
        )
        linear = values * seconds[0] / values[0]
        ax.fill_between(values, linear, 1.2 * linear, color="0.85", label="linear to 1.2 x linear")
        ax.errorbar(values, seconds, (seconds - low, high - seconds), marker="o", capsize=3, label="measured")
        ax.set(xscale="log", yscale="log", xlabel=f"{grows} ({size})", xticks=values, xticklabels=map(str, values))
        ax.minorticks_off()
    axes[0][0].set_ylabel("seconds of rollouts")
    axes[0][0].legend(fontsize="small")
    try:
        file = io.BytesIO()
        figure.savefig(file, format=Path(path).suffix[1:] or None)
        write_atomically(path, file.getvalue())
    except (OSError, ValueError) as error:
        raise UserError(f"--figure={path}: {error}") from None
    finally:
        plt.close(figure)
