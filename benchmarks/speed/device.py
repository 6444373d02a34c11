"""`launch/bench.py device`: the first hour with a GPU or TPU, one command whose parts can be interrupted.

    python launch/bench.py device --out=DIR                 every part that DIR does not have yet
    python launch/bench.py device --out=DIR --parts kernels peaks --sizes 0.5b

Every part runs in a process of its own, for at most --minutes, and writes DIR/PART.json; device.json has all of them.
The same command continues with the missing and the failed parts. Nothing is downloaded: weights are random.

versions     the device, its memory and published peaks, and the packages
peaks        measured rates of matrix products and of reading memory
kernels      the attention kernels of this device compared with the portable forms
rollout-SIZE prefill, decode and extend of scripted rollouts, next to their lower bounds from FLOPs and bytes
update-SIZE  an optimizer step of such rollouts (adapters for 7b), next to its lower bound
demo         the training run of `make demo`
colab        configs/colab.py with random weights, in the closed world

The bounds use the published peaks, on other devices the measured ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.speed.scripted import Ours, Script, ScriptedSampler, Work
from benchmarks.speed.timing import SIZES, log, machine, tabled, written
from benchmarks.speed.update import LORA, adapters_of, config_of, mask_of
from benchmarks.speed.update import Ours as Update
from psearch_jax.config import PRESETS, DecoderConfig, MeshSection
from psearch_jax.models import attention, decoder, ragged, ragged_chunk
from psearch_jax.models.attention import cached
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.runtime.accelerators import chip_of, forward_flops
from psearch_jax.runtime.cli import configure_jax
from psearch_jax.runtime.paths import TOY_POLICY
from psearch_jax.sharding import SAMPLING, make_mesh, param_shardings
from psearch_jax.train.checkpointing.checkpoint import newest_step
from psearch_jax.types import UserError

ROOT = Path(__file__).resolve().parents[2]
SHAPES: dict[str, DecoderConfig] = {**SIZES, **PRESETS}
ADAPTED = ("7b",)  # too large to train all weights on one device
SMALL = (  # flags of launch/train.py for a quick test
    "--config.train.steps=1",
    "--config.rollout.num_buckets=1",
    "--config.train.prompts=4",
    "--config.rollout.samples=4",
    "--config.rollout.slots=16",
    "--config.learning.mini_batch_rollouts=16",
    "--config.learning.micro_batch_rows=8",
    "--config.eval.questions_per_kind=0",
)
GRACE_S = 120  # from SIGTERM to SIGKILL
COLUMNS = ("part", "what", "amount", "seconds", "rate", "lower_bound_s", "share_of_bound")


def main(argv: Sequence[str]) -> None:
    flags = _flags(argv)
    if flags.run:
        configure_jax()
        written(str(flags.out / f"{flags.run}.json"), part(flags.run, flags))
        return
    flags.out.mkdir(parents=True, exist_ok=True)
    for name in flags.parts:
        done = _result(flags.out, name)
        if done is not None and "error" not in done:
            log(f"{name}: done before")
            continue
        _run(name, argv, flags)
    results = {name: result for name in flags.parts if (result := _result(flags.out, name)) is not None}
    lines = [{"part": name} | line for name, result in results.items() for line in result.get("lines", ())]
    print(tabled(lines, COLUMNS))
    for name, result in results.items():
        if "error" in result:
            print(f"{name}: FAILED: {result['error']}")
    written(str(flags.out / "device.json"), {"machine": machine(), "parts": results})


def _run(name: str, argv: Sequence[str], flags: argparse.Namespace) -> None:
    """Runs one part in its own process, so that it has the entire device and its failure ends nothing else."""
    log(f"{name}: begins, its output is in {flags.out / name}.log")
    began, error = time.monotonic(), ""
    command = [sys.executable, str(ROOT / "launch" / "bench.py"), "device", *argv, f"--run={name}"]
    with open(flags.out / f"{name}.log", "w", encoding="utf-8") as output:
        interrupts: list[int] = []
        # Ctrl-C between the start of the part and `try` would leave it running: it waits until `_stop` follows.
        usual = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            signal.signal(signal.SIGINT, usual)
            if interrupts:
                raise KeyboardInterrupt
            code = running.wait(60 * flags.minutes)
        except subprocess.TimeoutExpired:
            error, code = f"not done after {flags.minutes:g} minutes", 0
        finally:
            _stop(running)
    if code:
        lines = (flags.out / f"{name}.log").read_text(encoding="utf-8").strip().splitlines()
        error = lines[-1] if lines else f"exit code {code}"
    if error:
        written(str(flags.out / f"{name}.json"), {"error": error[:500]})
    log(f"{name}: {error or 'done'} ({time.monotonic() - began:.0f} s)")


def _stop(running: subprocess.Popen) -> None:
    """Ends a part and the run that it started, so that the next part has the device; after Ctrl-C, too."""
    if running.poll() is not None:
        return
    os.killpg(running.pid, signal.SIGTERM)  # a training run saves its state, and resumes in the next call
    try:
        running.wait(GRACE_S)
    except subprocess.TimeoutExpired:  # it hangs in the device's driver
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _result(out: Path, name: str) -> dict[str, Any] | None:
    file = out / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def part(name: str, flags: argparse.Namespace) -> dict[str, Any]:
    """The result of one part: `lines` of the table, and whatever else it measured."""
    kind, _, size = name.partition("-")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": versions,
        "peaks": lambda: peaks(flags.scale),
        "kernels": kernels,
        "rollout": lambda: rollout(size, flags),
        "update": lambda: update(size, flags),
        "demo": lambda: training("smoke", flags),
        "colab": lambda: training("colab", flags),
    }
    return parts[kind]()


def versions() -> dict[str, Any]:
    """The device and the packages."""
    device = jax.devices()[0]
    chip, stats = chip_of(device), device.memory_stats() or {}
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "devices": len(jax.devices()),
        "memory_bytes": stats.get("bytes_limit"),
        "published": None if chip is None else {"flops": chip.flops, "bytes_per_s": chip.bandwidth},
        **machine(),
    }


def timed(run: Callable[[], Any], repeats: int = 5) -> float:
    """The median seconds of a call, after one that compiles."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def peaks(scale: float) -> dict[str, Any]:
    """Rates of products of square matrices, and of reading an array."""
    n, lines, rates = (
        max(64, int(8192 * scale)) if jax.default_backend() != "cpu" else max(64, int(2048 * scale)),
        [],
        {},
    )
    for dtype in ("bfloat16", "float32"):
        x = jnp.ones((n, n), jnp.dtype(dtype))
        seconds = timed(lambda x=x: _product(x))
        rates[f"{dtype}_flops"] = 2 * n**3 / seconds
        lines.append(_line(f"{dtype} product of {n} x {n}", 1, seconds, f"{2e-12 * n**3 / seconds:.3g} TFLOP/s"))
    big = jnp.ones(max(2**16, int(2**28 * scale)), jnp.float32)
    seconds = timed(lambda: _total(big))
    rates["bytes_per_s"] = big.nbytes / seconds
    lines.append(_line(f"sum of {big.nbytes / 1e9:.2g} GB", 1, seconds, f"{big.nbytes / seconds / 1e9:.3g} GB/s"))
    return {"lines": lines, "measured": rates}


@jax.jit
def _product(x: jax.Array) -> jax.Array:
    return x @ x


@jax.jit
def _total(x: jax.Array) -> jax.Array:
    return jnp.sum(x)


def kernels() -> dict[str, Any]:
    """The largest difference of each kernel from its portable form in float32, relative to the largest value."""
    mesh, rng, errors = make_mesh(MeshSection(1, 1, 1), jax.devices()[:1]), np.random.default_rng(0), {}
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    B, T, N, K, H = 4, 512, 8, 2, 128
    q, k, v = (jnp.asarray(rng.normal(size=s), dtype) for s in ((B, T, N, H), (B, K, T, H), (B, K, T, H)))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (B, T)), axis=1), jnp.int32)
    form = attention.implementation_for(mesh, dtype)
    wide = tuple(x.astype(jnp.float32) for x in (q, k, v))
    with jax.set_mesh(mesh):
        for name, marked in (("causal", None), ("causal, packed rows", segments)):
            ours = jax.jit(attention.causal, static_argnums=3)(q, k, v, form, marked)
            errors[f"{name} ({form})"] = _relative(ours, attention.causal(*wide, "blocked", marked))
        cache = KVCache(*(jnp.asarray(rng.normal(size=(2, B, K, 1024, H)), dtype) for _ in range(2)))
        start = jnp.asarray([0, 1, 700, 1024], jnp.int32)
        shape = replace(PRESETS["7b"], heads=N, kv_heads=K, head_dim=H)
        old = cached.Keys(cache.k[1].astype(jnp.float32), cache.v[1].astype(jnp.float32))
        if ragged.applies(form, False, shape, jax.sharding.get_abstract_mesh()):
            one = (q[:, :1], k[:, :, :1], v[:, :, :1])
            ours = jax.jit(ragged.decode, static_argnums=6)(*one, cache, jnp.int32(1), start, form)
            theirs = cached.decode(*(x.astype(jnp.float32) for x in one), old, start)
            errors[f"decode by length ({form})"] = _relative(ours, theirs)
        if ragged_chunk.applies(form, False, shape, jax.sharding.get_abstract_mesh()):
            rows = jnp.arange(B, dtype=jnp.int32)
            ours = jax.jit(ragged_chunk.attend, static_argnums=7)(q, k, v, cache, jnp.int32(1), start, rows, form)
            errors[f"chunk by length ({form})"] = _relative(ours, cached.chunk_attention(*wide, old, start))
    limit = 1e-4 if dtype == jnp.float32 else 2e-2
    wrong = {name: error for name, error in errors.items() if not error < limit}
    if wrong:
        raise UserError(f"kernels: {wrong} found, accepted: relative differences below {limit}")
    return {"lines": [_line(name, 1, None, f"difference {error:.1e}") for name, error in errors.items()]}


def _relative(ours: jax.Array, theirs: jax.Array) -> float:
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


class Timed(ScriptedSampler):
    """Measures each program of the sampler, which runs by itself."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.seconds = dict.fromkeys(("prefill", "admit", "extend", "generate"), 0.0)

    def _clock(self, name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        out = jax.block_until_ready(run())
        self.seconds[name] += time.perf_counter() - began
        return out

    def prefill(self, *arguments: Any, **keywords: Any) -> Any:
        return self._clock("prefill", lambda: super(Timed, self).prefill(*arguments, **keywords))

    def admit(self, *arguments: Any, **keywords: Any) -> Any:
        return self._clock("admit", lambda: super(Timed, self).admit(*arguments, **keywords))

    def extend(self, *arguments: Any, **keywords: Any) -> Any:
        return self._clock("extend", lambda: super(Timed, self).extend(*arguments, **keywords))

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        return self._clock("generate", lambda: super(Timed, self).generate(*arguments, **keywords))


def work_of(size: str, scale: float, slots: int = 0) -> Work:
    """Rollouts of 2,048 tokens at scale 1: a prompt of 512, three turns of 128 and two observations of 576."""
    slots = slots or (32 if size in ADAPTED else 64)
    turn, observation, prompt = (max(4, round(n * scale)) for n in (128, 576, 512))
    script = Script((turn,) * 3, (observation,) * 2)
    return Work("device", prompt, math.gcd(8, slots), slots, (script,) * slots)


def rollout(size: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the sampler's programs for one batch of rollouts."""
    model, work = SHAPES[size], work_of(size, flags.scale, flags.slots)
    params = _weights(model, flags.dtype)
    ours = Ours(work, model, params, {}, 0.0, flags.dtype, Timed)
    ours.run()  # compiles
    ours.sampler.seconds = dict.fromkeys(ours.sampler.seconds, 0.0)
    began = time.perf_counter()
    ours.run()
    total, seconds, usage = time.perf_counter() - began, ours.sampler.seconds, ours.accounting()
    flops, bandwidth = _rates(flags)
    script, rows, prompts = work.scripts[0], len(work.scripts), len(work.scripts) // work.samples
    item = jnp.dtype(flags.dtype).itemsize
    observed = rows * sum(script.observations)
    read = item * (_layers(params) + model.vocab_rows * model.width)
    read += rows * work.length(script) * model.layers * model.kv_heads * model.head_dim * item  # half full, K and V
    steps = usage["decode_steps"]
    forward = forward_flops(model, [work.prompt_tokens] * prompts, prompts)
    inserted = forward_flops(model, script.observations * rows, 2 * rows)
    lines = [
        _bounded("prefill", prompts * work.prompt_tokens, seconds["prefill"], forward / flops),
        _bounded("decode steps", steps, seconds["generate"], steps * read / bandwidth),
        _bounded("extend", observed, seconds["extend"], inserted / flops),
        _line("all rollouts", rows, total, f"{rows / total:.3g} rollouts/s"),
    ]
    return {"lines": lines, "seconds": seconds, **usage}


def update(size: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an optimizer step on eight of these rollouts."""
    model, work, adapted = SHAPES[size], work_of(size, flags.scale), size in ADAPTED
    params = _weights(model, flags.dtype if adapted else "float32")  # products use flags.dtype
    masks = [mask_of(work.prompt_tokens, work.scripts[0])] * 8
    config = config_of(len(masks), len(masks[0]), flags.dtype, adapted)
    config = replace(config, model=replace(config.model, remat="full"))
    config = replace(config, learning=replace(config.learning, micro_batch_rows=1))
    ours = Update(config, model, params, masks, adapters=adapters_of(model) if adapted else None)
    ours.run()
    began = time.perf_counter()
    metrics = ours.run()
    seconds, tokens = time.perf_counter() - began, sum(map(len, masks))
    passes = 4 - adapted  # forward, twice backward (once with adapters), and the forward pass that remat repeats
    bound = passes * forward_flops(model, list(map(len, masks)), int(sum(map(np.sum, masks)))) / _rates(flags)[0]
    return {
        "lines": [_bounded("update", tokens, seconds, bound)],
        "loss": metrics["loss"],
        "rank": LORA.rank * adapted,
    }


def training(config: str, flags: argparse.Namespace) -> dict[str, Any]:
    """A training run as a user starts it; what an interrupted one has done in an earlier call does not count."""
    workdir = flags.out / f"{config}_run"
    command = [
        sys.executable,
        str(ROOT / "launch" / "train.py"),
        f"--config=configs/{config}.py",
        f"--workdir={workdir}",
    ]
    if config == "colab":
        fields = {"model.path": "", "model.preset": "0.5b", "model.tokenizer": str(TOY_POLICY)}
        fields |= {"data.source": "closed_world", "data.template": "toy", "rollout.prompt_tokens": "64"}
        command += [f"--config.{name}={value}" for name, value in fields.items()]
    done_before, began = newest_step(workdir), time.monotonic()
    # SIGTERM is for the run, which saves: this process waits for it. (A handler is not inherited, SIG_IGN would be.)
    signal.signal(signal.SIGTERM, lambda *_: None)
    code = subprocess.run([*command, *(SMALL if flags.scale < 1 else ())], cwd=ROOT).returncode
    if code:
        raise UserError(f"{config}: exit code {code}, see above")
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    seconds, steps = time.monotonic() - began, summary["steps"] - done_before
    what = f"{steps} of {summary['steps']} steps"
    return {"lines": [_line(what, steps, seconds, "")], "summary": summary}


def _weights(model: DecoderConfig, dtype: str) -> nnx.State:
    """Random weights on the first device."""
    mesh = make_mesh(MeshSection(1, 1, 1), jax.devices()[:1])
    return decoder.random_params(model, 0, jnp.dtype(dtype), lambda a: param_shardings(a, SAMPLING, mesh))


def _layers(params: nnx.State) -> int:
    return sum(x.size for x in jax.tree.leaves(params["layers"]))


def _rates(flags: argparse.Namespace) -> tuple[float, float]:
    """FLOPs and bytes per second: as published, else as measured by the part `peaks`."""
    chip = chip_of(jax.devices()[0])
    if chip is not None:
        return chip.flops, chip.bandwidth
    measured = (_result(flags.out, "peaks") or {}).get("measured") or peaks(flags.scale)["measured"]
    return measured[f"{flags.dtype}_flops"], measured["bytes_per_s"]


def _line(what: str, amount: float, seconds: float | None, rate: str) -> dict[str, Any]:
    shown = None if seconds is None else float(f"{seconds:.4g}")
    return {"what": what, "amount": amount, "seconds": shown, "rate": rate}


def _bounded(what: str, amount: float, seconds: float, bound: float) -> dict[str, Any]:
    line = _line(what, amount, seconds, f"{amount / seconds:.4g} per s")
    return line | {"lower_bound_s": float(f"{bound:.3g}"), "share_of_bound": float(f"{bound / seconds:.3g}")}


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    flags = argparse.ArgumentParser(
        prog="bench device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--out", type=Path, required=True, help="directory of the results")
    flags.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b", "7b"], choices=SHAPES, help="shapes to measure")
    flags.add_argument("--parts", nargs="+", help="default: all")
    flags.add_argument("--minutes", type=float, default=10.0, help="limit of each part")
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the products")
    flags.add_argument("--scale", type=float, default=1.0, help="factor of all lengths; below 1 for a quick test")
    flags.add_argument("--slots", type=int, default=0, help="rows decoded together; default: 64, 32 for 7b")
    flags.add_argument("--run", help=argparse.SUPPRESS)  # the part that this process runs
    parsed = flags.parse_args(argv)
    every = ["versions", "peaks", "kernels"]
    every += [f"{kind}-{size}" for size in parsed.sizes for kind in ("rollout", "update")] + ["demo", "colab"]
    parsed.parts = parsed.parts or every
    if parsed.slots < 0:
        flags.error(f"--slots={parsed.slots}: accepted: at least 1, or 0 for the default")
    for name in parsed.parts:
        if name not in every:
            flags.error(f"--parts {name}: accepted: {', '.join(every)}")
    return parsed
