"""The mesh (data, fsdp, tensor), and the tables that map logical array axes to mesh axes.

Every parameter is declared once with logical axis names (models/decoder.py). Three tables map them to the mesh:
`STORAGE` for master weights, optimizer state and gradients; `SAMPLING` for the sampler's copy, which is not split over
fsdp, because each decoded token would all-gather every layer; `COMPUTE` for activations.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from psearch_jax.config import MeshSection
from psearch_jax.types import UserError

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # the axes that rows are split over
MeshAxes = tuple[str, ...] | str | None

_TENSOR = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
STORAGE: Mapping[str, MeshAxes] = {**_TENSOR, "embed": "fsdp"}
SAMPLING: Mapping[str, MeshAxes] = _TENSOR
COMPUTE: Mapping[str, MeshAxes] = {**_TENSOR, "rows": ROWS, "positions": "tensor"}
_STAND_IN: contextvars.ContextVar[bool] = contextvars.ContextVar("stand_in", default=False)


def is_one_cpu(mesh: Mesh) -> bool:
    """Whether the mesh is a single CPU device, for which some matrix products and copies have other layouts."""
    return mesh.size == 1 and mesh.devices.flat[0].platform == "cpu" and not _STAND_IN.get()


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Inside this context a CPU stands in for another device: `is_one_cpu` is false."""
    token = _STAND_IN.set(True)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


def make_mesh(section: MeshSection, devices: list[Any] | None = None) -> Mesh:
    """The device mesh of a run; one axis may be -1 and gets the devices that the other two leave.

    Raises:
      UserError: the product of the axes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [section.data, section.fsdp, section.tensor]
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise UserError(f"config.mesh: found data,fsdp,tensor={sizes}, accepted: positive sizes, at most one -1")
    if -1 in sizes:
        known = -sizes[0] * sizes[1] * sizes[2]
        sizes[sizes.index(-1)] = max(1, len(devices) // known)
    if sizes[0] * sizes[1] * sizes[2] != len(devices):
        raise UserError(
            f"config.mesh: data={sizes[0]} x fsdp={sizes[1]} x tensor={sizes[2]} is not the number of devices, "
            f"{len(devices)}; accepted: sizes with that product, such as --config.mesh.data=1 --config.mesh.fsdp=-1 "
            "--config.mesh.tensor=1"
        )
    types = (AxisType.Auto,) * 3
    try:
        return jax.make_mesh(tuple(sizes), AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # an axis is not a product of physical axes of the slice, such as 8 in 4x4
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except AssertionError:  # the devices are not a block of the slice: those that `rollout_devices` leaves of it
        grid = np.asarray(devices).reshape(sizes)
    return Mesh(grid, AXES, axis_types=types)


def make_meshes(section: MeshSection, devices: list[Any] | None = None) -> tuple[Mesh, Mesh]:
    """The meshes that train and sample: of the same devices, or with `rollout_devices` of separate ones.

    The same devices have one mesh, or two that differ in `tensor` (`regroup`). Of separate devices, every process has
    an equal part of both: the last of its devices sample. So weights are sent within processes. The TPUs of several
    processes cannot be divided: a program needs all chips of a host.

    Raises:
      UserError: as `make_mesh`, or the devices cannot be divided in this way.
    """
    devices, n = jax.devices() if devices is None else devices, section.rollout_devices
    if not n:
        return _regrouped(make_mesh(section, devices), section.rollout_tensor)
    sampling_tensor = section.rollout_tensor or max(1, section.tensor)
    on_tpu = devices[0].platform == "tpu"
    if on_tpu and jax.process_count() > 1:
        raise UserError(
            f"config.mesh.rollout_devices: found {n} with {jax.process_count()} processes of TPUs, accepted: 0, or a "
            "single process"
        )
    by_process: dict[int, list[Any]] = {}
    for device in devices:  # a plan's slice may have several hosts
        by_process.setdefault(0 if on_tpu else device.process_index, []).append(device)
    count, each = len(by_process), len(devices) // len(by_process)
    if any(len(part) != each for part in by_process.values()):
        sizes = ", ".join(str(len(part)) for part in by_process.values())
        raise UserError(
            f"config.mesh.rollout_devices: found {n} with {sizes} devices in the processes, accepted: 0, or equally "
            "many devices in each"
        )
    if n >= len(devices) or n % (count * sampling_tensor):
        raise UserError(
            f"config.mesh.rollout_devices: found {n} with rollout_tensor={sampling_tensor}, {len(devices)} "
            f"devices and {count} process{'es' * (count > 1)}, accepted: fewer than all, and a multiple of "
            f"{count * sampling_tensor} (processes x rollout_tensor)"
        )
    own = n // count
    train = make_mesh(section, [device for part in by_process.values() for device in part[:-own]])
    if count > 1 and (each - own) % sampling_tensor and (each - own) % train.shape["tensor"]:
        raise UserError(
            f"config.mesh: found tensor={train.shape['tensor']} and rollout_tensor={sampling_tensor} with "
            f"{each - own} training devices in each process, accepted: one of them divides that number"
        )
    shape = MeshSection(data=1, fsdp=n // sampling_tensor, tensor=sampling_tensor)
    return train, make_mesh(shape, [device for part in by_process.values() for device in part[-own:]])


def sampling_mesh(section: MeshSection) -> Mesh:
    """The mesh of a program that does not train, such as an evaluation: all devices, with the sampler's `tensor`."""
    tensor = section.rollout_tensor
    return make_mesh(MeshSection(tensor=tensor) if tensor else section)


@dataclass(frozen=True)
class Regrouping:
    """Two meshes of the same devices that differ in `tensor`, and how the devices exchange the weights' parts.

    `common` divides the devices in the order of `source`; one of its axes, `part`, belongs to `fsdp` or to `tensor`.
    An array moves from its place by `tables[0]`, which is the one by `STORAGE` in `source`, through one program per
    further table, to its place by `tables[-1]`, which is the one by `SAMPLING` in `target`.
    """

    source: Mesh
    target: Mesh
    common: Mesh
    tables: tuple[Mapping[str, MeshAxes], ...]


def regroup(mesh: Mesh, tensor: int) -> Regrouping | None:
    """The devices of `mesh`, rows split over fewer or more of them, for a sampler with another `tensor`.

    Neighbours along `tensor` stay neighbours. Weights move in two steps, so that no device ever holds a complete
    array: first `part` changes its axis, or is gathered, and then fsdp is gathered. None if this is impossible: no
    size of `tensor` divides the other, or the rows cannot be split in this way.
    """
    data, fsdp, now = mesh.devices.shape
    large, small = max(now, tensor), min(now, tensor)
    part = large // small
    if large % small or (tensor > now and fsdp % part):
        return None
    whole = dict.fromkeys(_TENSOR, "tensor")
    in_parts = dict.fromkeys(_TENSOR, ("tensor", "part"))
    tables: tuple[Mapping[str, MeshAxes], ...]
    if tensor > now:
        grid, axes = mesh.devices.reshape(data, fsdp // part, part, now), ("data", "fsdp", "part", "tensor")
        target = grid.swapaxes(2, 3).reshape(data, fsdp // part, tensor)
        tables = ({**whole, "embed": ("fsdp", "part")}, {**in_parts, "embed": "fsdp"}, in_parts)
    else:
        grid, axes = mesh.devices.reshape(data, fsdp, tensor, part), ("data", "fsdp", "tensor", "part")
        target = grid.swapaxes(2, 3).reshape(data, fsdp * part, tensor)
        tables = ({**in_parts, "embed": "fsdp"}, {**whole, "embed": "fsdp"}, whole)
    common = Mesh(grid, axes, axis_types=(AxisType.Auto,) * 4)
    return Regrouping(mesh, Mesh(target, AXES, axis_types=mesh.axis_types), common, tables)


def _regrouped(mesh: Mesh, tensor: int) -> tuple[Mesh, Mesh]:
    """The mesh, and its devices with another `tensor`; 0: the same.

    Raises:
      UserError: they cannot be divided so.
    """
    data, fsdp, now = mesh.devices.shape
    if tensor in (0, now):
        return mesh, mesh
    made = regroup(mesh, tensor)
    if made is None:
        accepted = ", ".join(str(n) for n in range(1, mesh.size + 1) if regroup(mesh, n))
        raise UserError(
            f"config.mesh.rollout_tensor: found {tensor} with a mesh of tensor={now} and fsdp={fsdp}, accepted: 0, "
            f"{accepted}"
        )
    if now > 1:
        return mesh, made.target
    # The sampler's groups are laid out along the slice. Those of training, over all devices, may have any order.
    sampling = make_mesh(MeshSection(data, fsdp // tensor, tensor), list(mesh.devices.flat))
    return Mesh(sampling.devices.reshape(data, fsdp, 1), AXES, axis_types=mesh.axis_types), sampling


def own_part(mesh: Mesh) -> Mesh:
    """This process's devices of `mesh`, as a mesh: they hold every shard of an array split over `tensor` only.

    Raises:
      ValueError: they do not, because a part of `tensor` is on no device of this process.
    """
    if jax.process_count() == 1:
        return mesh
    parts = [
        [device for device in part.flat if device.process_index == jax.process_index()]
        for part in np.moveaxis(mesh.devices, -1, 0)
    ]
    if not parts[0] or len({len(part) for part in parts}) > 1:
        raise ValueError(f"tensor={len(parts)} is divided over several processes")
    return Mesh(np.array(parts).T[None], AXES, axis_types=mesh.axis_types)


def spec(axes: tuple[str | None, ...], rules: Mapping[str, MeshAxes], mesh: Any, shape: tuple[int, ...] | None = None):
    """PartitionSpec of an array with these logical axes.

    An axis whose size is not divisible by its mesh axes is not split (kv heads if `tensor` exceeds their number).

    Raises:
      ValueError: two dimensions of the array would be split over the same mesh axis.
    """
    out, used = [], set()
    for i, axis in enumerate(axes):
        target = rules.get(axis) if axis else None
        names = (target,) if isinstance(target, str) else (target or ())
        parts = 1
        for name in names:
            parts *= mesh.shape[name]
        if shape is not None and shape[i] % parts:
            names = ()
        if used & set(names):
            raise ValueError(f"logical axes {axes}: mesh axis {sorted(used & set(names))} would split two dimensions")
        used |= set(names)
        out.append(names if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*out)


def param_shardings(abstract: nnx.State, rules: Mapping[str, MeshAxes], mesh: Mesh) -> nnx.State:
    """The NamedSharding of every parameter, in a tree with the structure of the parameters.

    Args:
      abstract: parameters or their ShapeDtypeStructs; each Variable carries `axes`.
    """

    def one(variable: nnx.Variable) -> nnx.Variable:
        sharding = NamedSharding(mesh, spec(variable.get_metadata()["axes"], rules, mesh, variable.shape))
        return variable.replace(sharding)

    return jax.tree.map(one, abstract, is_leaf=lambda x: isinstance(x, nnx.Variable))


def placed(abstract: Any, shardings: Any) -> Any:
    """ShapeDtypeStructs with shardings for a tree of arrays or structs, to compile a program for such arguments."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains an activation to its sharding in the mesh of `jax.set_mesh`; does nothing if no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, COMPUTE, mesh, x.shape))


def fsdp_gathered(x: jax.Array, *axes: str | None) -> jax.Array:
    """A parameter as a computation uses it, all-gathered over fsdp; its gradient is scattered over fsdp again.

    A constraint alone also applies to the gradient, which every device would then hold, and sum, in full.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else _gathered(x, *(spec(axes, rules, mesh, x.shape) for rules in (COMPUTE, STORAGE)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, computed: PartitionSpec, stored: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, computed)


def _gathered_forward(x: jax.Array, computed: PartitionSpec, stored: PartitionSpec) -> tuple[jax.Array, None]:
    return _gathered(x, computed, stored), None


def _gathered_backward(
    computed: PartitionSpec, stored: PartitionSpec, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, stored),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def on_own_rows(f: Callable[..., jax.Array], x: jax.Array, axes: tuple[str | None, ...], *others: Any) -> jax.Array:
    """Calls `f(first, x, *arrays)` on each device with its own rows of all arrays; x's local rows start at `first`.

    Gathered or scattered rows thus never leave their device. The partitioner would all-gather the array instead.

    Args:
      x: an array with the logical axes `axes`, which include "rows"; the result of `f` has the same axes.
      others: pairs of an array and its logical axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arrays = [array for array, _ in others]
    if mesh.empty or mesh.size == 1:
        return f(0, x, *arrays)
    places = [spec(names, COMPUTE, mesh, array.shape) for array, names in [(x, axes), *others]]

    def local(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        return f(jax.lax.axis_index(ROWS) * x.shape[axes.index("rows")], x, *arrays)

    return jax.shard_map(local, in_specs=tuple(places), out_specs=places[0], check_vma=False)(x, *arrays)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of x [B, ...] at `rows` [R]; -1 gives an arbitrary row.

    On a mesh, `rows` is split like x, and each device's part refers to rows on the same device.
    """

    def take(first: Any, x: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.maximum(rows - first, 0), axis=0)

    return on_own_rows(take, x, _by_rows(x), (rows, ("rows",)))


def put_rows(x: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """x [B, ...] with `values` [R, ...] at `rows` [R], which are split as in `take_rows`; -1 writes nothing."""

    def put(first: Any, x: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
        return x.at[jnp.where(rows < 0, x.shape[0], rows - first)].set(values.astype(x.dtype), mode="drop")

    return on_own_rows(put, x, _by_rows(x), (rows, ("rows",)), (values, _by_rows(values)))


def _by_rows(x: jax.Array) -> tuple[str | None, ...]:
    return ("rows", *[None] * (x.ndim - 1))


def rows_sharding(mesh: Mesh, ndim: int, axis: int = 0) -> NamedSharding:
    """Sharding of an array that is split only along its row dimension `axis`."""
    entries: list[MeshAxes] = [None] * ndim
    entries[axis] = ROWS
    return NamedSharding(mesh, PartitionSpec(*entries))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_rows(mesh: Mesh, **counts: int) -> None:
    """Refuses row counts that are not divisible by mesh data x fsdp; `counts` maps `section__field` to a count.

    Raises:
      UserError: it names the field and the accepted values.
    """
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    for field, value in counts.items():
        if value % rows:
            name = field.replace("__", ".")
            raise UserError(f"config.{name}: found {value}, accepted: a multiple of mesh data x fsdp = {rows}")


def check_heads(mesh: Mesh, heads: int) -> None:
    """Refuses a `tensor` axis that does not divide the query heads.

    Raises:
      UserError: it names the accepted sizes.
    """
    tensor = mesh.shape["tensor"]
    if heads % tensor:
        accepted = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(f"config.mesh.tensor: found {tensor}, accepted for {heads} query heads: {accepted}")
