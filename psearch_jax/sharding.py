"""The mesh (data, fsdp, tensor), and the tables that map logical array axes to mesh axes.

Every parameter is declared once with logical axis names (models/decoder.py). Three tables map them to the mesh:
`STORAGE` for master weights, optimizer state and gradients; `SAMPLING` for the sampler's copy, which is not split over
fsdp, because each decoded token would all-gather every layer; `COMPUTE` for activations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
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
    return Mesh(grid, AXES, axis_types=types)


def make_meshes(section: MeshSection, devices: list[Any] | None = None) -> tuple[Mesh, Mesh]:
    """The meshes that train and sample. They have the same devices in the same order, and may differ in `tensor`.

    Raises:
      UserError: as `mesh_sizes`, or `rollout_tensor` does not suit the mesh.
    """
    devices = jax.devices() if devices is None else devices
    data, fsdp, tensor = sizes = mesh_sizes(section, len(devices))
    rollout_tensor = section.rollout_tensor or tensor
    if not can_regroup(fsdp, tensor, rollout_tensor):
        accepted = ", ".join(str(n) for n in range(1, fsdp * tensor + 1) if can_regroup(fsdp, tensor, n))
        raise UserError(
            f"config.mesh.rollout_tensor: found {rollout_tensor} with a mesh of fsdp={fsdp} and tensor={tensor}, "
            f"accepted: 0, {accepted}"
        )
    # Devices of one sampler group are neighbours of the slice; the mesh of training follows from that.
    rollout_sizes = (data, fsdp * tensor // rollout_tensor, rollout_tensor)
    rollout_mesh = make_mesh(MeshSection(*rollout_sizes), devices)
    return Mesh(rollout_mesh.devices.reshape(sizes), AXES, axis_types=rollout_mesh.axis_types), rollout_mesh


def can_regroup(fsdp: int, tensor: int, rollout_tensor: int) -> bool:
    """Whether a sampler can use `rollout_tensor` on the devices of a mesh with these sizes of `fsdp` and `tensor`."""
    return rollout_tensor == tensor or (tensor == 1 and fsdp % rollout_tensor == 0)


def describe_meshes(mesh: Mapping[str, int], rollout_mesh: Mapping[str, int]) -> str:
    """The sizes of both meshes in words; only those of the first if they are equal."""
    first, second = (" x ".join(f"{name} {size}" for name, size in sizes.items()) for sizes in (mesh, rollout_mesh))
    return first if first == second else f"{first} to train, {second} to sample"


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
        if shape is not None and shape[i] % math.prod(mesh.shape[name] for name in names):
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

    def shard(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata()["axes"]
        return variable.replace(NamedSharding(mesh, spec(axes, rules, mesh, variable.shape)))

    return jax.tree.map(shard, abstract, is_leaf=lambda x: isinstance(x, nnx.Variable))


def attach_shardings(abstract: Any, shardings: Any) -> Any:
    """ShapeDtypeStructs with shardings for a tree of arrays or structs, to compile a program for such arguments."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains an activation to its sharding in the mesh of `jax.set_mesh`; does nothing if no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, COMPUTE, mesh, x.shape))


def gather_fsdp(x: jax.Array, *axes: str | None) -> jax.Array:
    """A parameter as a computation uses it, all-gathered over fsdp; its gradient is scattered over fsdp again.

    A constraint alone also applies to the gradient, which every device would then hold, and sum, in full.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else _gather(x, *(spec(axes, rules, mesh, x.shape) for rules in (COMPUTE, STORAGE)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, computed: PartitionSpec, stored: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, computed)


def _gather_forward(x: jax.Array, computed: PartitionSpec, stored: PartitionSpec) -> tuple[jax.Array, None]:
    return _gather(x, computed, stored), None


def _gather_backward(computed: PartitionSpec, stored: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, stored),)


_gather.defvjp(_gather_forward, _gather_backward)


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
    specs = [spec(names, COMPUTE, mesh, array.shape) for array, names in [(x, axes), *others]]

    def local(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        return f(jax.lax.axis_index(ROWS) * x.shape[axes.index("rows")], x, *arrays)

    return jax.shard_map(local, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)(x, *arrays)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of x [B, ...] at `rows` [R]; -1 gives an arbitrary row.

    On a mesh, `rows` is split like x, and each device's part refers to rows on the same device.
    """

    def take(first: Any, x: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.maximum(rows - first, 0), axis=0)

    return on_own_rows(take, x, ("rows", *[None] * (x.ndim - 1)), (rows, ("rows",)))


def put_rows(x: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """x [B, ...] with `values` [R, ...] at `rows` [R], which are split as in `take_rows`; -1 writes nothing."""

    def put(first: Any, x: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
        return x.at[jnp.where(rows < 0, x.shape[0], rows - first)].set(values.astype(x.dtype), mode="drop")

    axes = ("rows", *[None] * (x.ndim - 1))
    return on_own_rows(put, x, axes, (rows, ("rows",)), (values, axes))


def rows_sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    """Sharding of an array that is split only along its rows, the first dimension."""
    return NamedSharding(mesh, PartitionSpec(ROWS, *[None] * (ndim - 1)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put(values: Any, shardings: Any) -> Any:
    """Places values that every process holds, each on its own devices. `shardings` may be a prefix of `values`.

    jax.device_put compares such values between the processes first. Its collectives may meet those of a program that
    still runs, which stops a run on several CPU processes.
    """

    def put_array(value: Any, sharding: NamedSharding) -> jax.Array:
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    return jax.tree.map(put_array, values, jax.tree.broadcast(shardings, values))


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
