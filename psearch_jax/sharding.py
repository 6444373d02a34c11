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
from dataclasses import dataclass, replace
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


def on_cpus(mesh: Mesh) -> bool:
    """Whether the mesh has CPU devices that stand in for no others."""
    return mesh.devices.flat[0].platform == "cpu" and not _STAND_IN.get()


def is_one_cpu(mesh: Mesh) -> bool:
    """Whether the mesh is a single CPU device, for which some matrix products and copies have other layouts."""
    return mesh.size == 1 and on_cpus(mesh)


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Inside this context CPUs stand in for other devices: `on_cpus` and `is_one_cpu` are false."""
    token = _STAND_IN.set(True)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


def mesh_sizes(section: MeshSection, count: int) -> tuple[int, int, int]:
    """The sizes of `data`, `fsdp` and `tensor` for `count` devices; one may be -1 and gets what the others leave.

    Raises:
      UserError: their product is not the number of devices.
    """
    sizes = [section.data, section.fsdp, section.tensor]
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise UserError(f"config.mesh: found data,fsdp,tensor={sizes}, accepted: positive sizes, at most one -1")
    if -1 in sizes:
        known = -sizes[0] * sizes[1] * sizes[2]
        sizes[sizes.index(-1)] = max(1, count // known)
    data, fsdp, tensor = sizes
    if data * fsdp * tensor != count:
        raise UserError(
            f"config.mesh: data={data} x fsdp={fsdp} x tensor={tensor} is not the number of devices, {count}; "
            "accepted: sizes with that product, such as --config.mesh.data=1 --config.mesh.fsdp=-1 "
            "--config.mesh.tensor=1"
        )
    return data, fsdp, tensor


def make_mesh(section: MeshSection, devices: list[Any] | None = None) -> Mesh:
    """The device mesh of a run.

    Raises:
      UserError: as `mesh_sizes`.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(section, len(devices))
    types = (AxisType.Auto,) * 3
    try:
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # an axis is not a product of physical axes of the slice, such as 8 in 4x4
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except AssertionError:  # the devices are not a block of the slice: those that `rollout_devices` leaves of it
        grid = np.asarray(devices).reshape(sizes)
    return Mesh(grid, AXES, axis_types=types)


def make_meshes(section: MeshSection, devices: list[Any] | None = None) -> tuple[Mesh, Mesh]:
    """The meshes that train and sample: of the same devices, or with `rollout_devices` of separate ones.

    The same devices have one mesh, or two that differ in `tensor` (`regrouping`). Of separate devices, every process
    has an equal part of both: the last of its devices sample. So weights are sent within processes. The TPUs of
    several processes cannot be divided: a program needs all chips of a host.

    Raises:
      UserError: as `make_mesh`, or the devices cannot be divided in this way.
    """
    devices, n = jax.devices() if devices is None else devices, section.rollout_devices
    if not n:
        return _meshes_of_the_same(section, devices)
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
    if n >= len(devices) or n % count:
        raise UserError(
            f"config.mesh.rollout_devices: found {n} with {len(devices)} devices and {count} "
            f"process{'es' * (count > 1)}, accepted: fewer than all, and a multiple of {count} (processes)"
        )
    own = n // count
    train = make_mesh(section, [device for part in by_process.values() for device in part[:-own]])
    sizes = train.devices.shape
    tensor = section.rollout_tensor or sizes[-1]
    _check_rollout_tensor(sizes, tensor)
    if n % (count * tensor):
        raise UserError(
            f"config.mesh.rollout_devices: found {n} with rollout_tensor={tensor} and {count} "
            f"process{'es' * (count > 1)}, accepted: a multiple of {count * tensor} (processes x rollout_tensor)"
        )
    if count > 1 and (each - own) % tensor and (each - own) % sizes[-1]:
        raise UserError(
            f"config.mesh: found tensor={sizes[-1]} and rollout_tensor={tensor} with {each - own} training devices in "
            "each process, accepted: one of them divides that number"
        )
    shape = MeshSection(data=1, fsdp=n // tensor, tensor=tensor)
    return train, make_mesh(shape, [device for part in by_process.values() for device in part[-own:]])


def _meshes_of_the_same(section: MeshSection, devices: list[Any]) -> tuple[Mesh, Mesh]:
    """Two meshes of all devices, or the same one twice."""
    sizes = data, fsdp, now = mesh_sizes(section, len(devices))
    tensor = section.rollout_tensor or now
    _check_rollout_tensor(sizes, tensor)
    if tensor != now and (now == 1 or 1 < tensor < now):
        # The smaller groups, those of the sampler, get neighbours of the slice. Those of training follow from them.
        sampling = make_mesh(MeshSection(data, fsdp * now // tensor, tensor), devices)
        grid = sampling.devices
        if now > 1:  # the inverse of `regrouping`
            grid = grid.reshape(data, fsdp, now // tensor, tensor).swapaxes(2, 3)
        return Mesh(grid.reshape(sizes), AXES, axis_types=sampling.axis_types), sampling
    mesh = make_mesh(section, devices)
    return mesh, mesh if tensor == now else regrouping(mesh, tensor).target


def _check_rollout_tensor(sizes: tuple[int, ...], tensor: int) -> None:
    data, fsdp, now = sizes
    if not can_regroup(fsdp, now, tensor):
        accepted = ", ".join(str(n) for n in range(1, fsdp * now + 1) if can_regroup(fsdp, now, n))
        raise UserError(
            f"config.mesh.rollout_tensor: found {tensor} with a mesh of fsdp={fsdp} and tensor={now}, accepted: 0, "
            f"{accepted}"
        )


def sampling_mesh(section: MeshSection) -> Mesh:
    """The mesh of a program that does not train, such as an evaluation: all devices, with the sampler's `tensor`."""
    return make_meshes(replace(section, rollout_devices=0))[1]


@dataclass(frozen=True)
class Regrouping:
    """How devices exchange the parts of weights between a mesh and `target`, which differs in `tensor`.

    `common` divides the devices in the order of the mesh; one of its axes, `part`, belongs to `fsdp` or to `tensor`.
    An array moves from its place by `tables[0]`, which is the one by `STORAGE` in the mesh, to its place by each
    further table. The last is the one by `SAMPLING` in `target`.
    """

    target: Mesh
    common: Mesh
    tables: tuple[Mapping[str, MeshAxes], ...]


def can_regroup(fsdp: int, now: int, tensor: int) -> bool:
    """Whether a mesh with these sizes of `fsdp` and `tensor` has a regrouping for another `tensor`."""
    return now % tensor == 0 or (tensor % now == 0 and fsdp % (tensor // now) == 0)


def regrouping(mesh: Mesh, tensor: int) -> Regrouping:
    """The devices of `mesh` divided for a sampler with another `tensor`.

    Weights move in two steps: first `part` changes its axis, or is gathered, and then fsdp is gathered. So no device
    ever holds more of a kernel than it does in the end.

    Raises:
      ValueError: `can_regroup` is false.
    """
    data, fsdp, now = mesh.devices.shape
    if not can_regroup(fsdp, now, tensor):
        raise ValueError(f"fsdp={fsdp} and tensor={now} cannot be regrouped for tensor={tensor}")
    together = dict.fromkeys(_TENSOR, "tensor")
    in_parts = dict.fromkeys(_TENSOR, ("tensor", "part"))
    tables: tuple[Mapping[str, MeshAxes], ...]
    if tensor > now:
        part, axes = tensor // now, ("data", "fsdp", "part", "tensor")
        grid = mesh.devices.reshape(data, fsdp // part, part, now)
        tables = ({**together, "embed": ("fsdp", "part")}, {**in_parts, "embed": "fsdp"}, in_parts)
    else:
        part, axes = now // tensor, ("data", "fsdp", "tensor", "part")
        grid = mesh.devices.reshape(data, fsdp, tensor, part)
        tables = ({**in_parts, "embed": "fsdp"}, {**together, "embed": "fsdp"}, together)
    target = Mesh(grid.swapaxes(2, 3).reshape(data, -1, tensor), AXES, axis_types=mesh.axis_types)
    return Regrouping(target, Mesh(grid, axes, axis_types=(AxisType.Auto,) * 4), tables)


def described(mesh: Mapping[str, int], rollout_mesh: Mapping[str, int]) -> str:
    """The sizes of both meshes in words; only those of the first if they are equal."""
    first, second = (" x ".join(f"{name} {size}" for name, size in sizes.items()) for sizes in (mesh, rollout_mesh))
    return first if first == second else f"{first} to train, {second} to sample"


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


def put(values: Any, shardings: Any) -> Any:
    """Places values that every process holds, each on its own devices. `shardings` may be a prefix of `values`.

    jax.device_put compares such values between the processes first. Its collectives may meet those of a program that
    still runs, which stops a run on several CPU processes.
    """

    def one(value: Any, sharding: NamedSharding) -> jax.Array:
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    return jax.tree.map(one, values, jax.tree.broadcast(shardings, values))


def check_rows(mesh: Mesh, **counts: int) -> None:
    """Refuses row counts that the mesh does not divide; `counts` maps `section__field` to a count.

    Raises:
      UserError: it names the field and the accepted values.
    """
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    for field, value in counts.items():
        if value % rows:
            name, tensor = field.replace("__", "."), mesh.shape["tensor"]
            raise UserError(
                f"config.{name}: found {value}, accepted: a multiple of {rows} = {mesh.size} devices / tensor={tensor}"
            )


def check_heads(mesh: Mesh, heads: int, field: str = "tensor") -> None:
    """Refuses a mesh whose `tensor` does not divide the query heads.

    Args:
      field: of config.mesh, to name in the message.

    Raises:
      UserError: it names the accepted sizes.
    """
    tensor = mesh.shape["tensor"]
    if heads % tensor:
        accepted = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(f"config.mesh.{field}: found {tensor}, accepted for {heads} query heads: {accepted}")
