"""The mesh, and the tables from logical axes to mesh axes."""

import jax
import pytest
from flax import nnx
from helpers import one_device_mesh, random_params, tiny_config
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from psearch_jax.config import MeshSection
from psearch_jax.models import decoder
from psearch_jax.planning.targets import tpu_target
from psearch_jax.sharding import (
    AXES,
    COMPUTE,
    SAMPLING,
    STORAGE,
    check_heads,
    check_rows,
    constrain,
    make_mesh,
    make_meshes,
    param_shardings,
    rows_sharding,
    spec,
)
from psearch_jax.types import UserError


def abstract_mesh(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    "section",
    [MeshSection(2, 1, 1), MeshSection(1, -1, 2), MeshSection(-1, -1, 1), MeshSection(0, 1, 1), MeshSection(1, -2, 1)],
)
def test_a_mesh_that_does_not_divide_the_devices_is_one_line(section):
    """A mesh that leaves devices out, or needs more than there are, is reported in one line; -1 takes the rest."""
    assert dict(make_mesh(MeshSection(1, -1, 1), jax.devices()[:1]).shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    with pytest.raises(UserError) as caught:
        make_mesh(section, jax.devices()[:1])
    assert str(caught.value).startswith("config.mesh") and "\n" not in str(caught.value)


def test_the_sampler_has_neighbours_along_tensor():
    """The devices of a sampler's group are neighbours in the slice; both meshes have the same devices in order."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
    devices = tpu_target("v5e:4x4").devices
    for tensor, sampler_tensor in ((1, 2), (1, 4), (4, 4)):
        training, sampling = make_meshes(MeshSection(1, -1, tensor, rollout_tensor=sampler_tensor), devices)
        assert sampling.devices.shape == (1, 16 // sampler_tensor, sampler_tensor)
        assert list(sampling.devices.flat) == list(training.devices.flat)
        assert set(sampling.devices.flat) == set(devices)
        for group in sampling.devices[0]:
            columns, rows = ({device.coords[i] for device in group} for i in (0, 1))
            assert len(columns) * len(rows) == sampler_tensor, "not a line or a square"
            assert all(max(places) - min(places) == len(places) - 1 for places in (columns, rows)), "not neighbours"
    for sampler_tensor in (3, 32):
        with pytest.raises(UserError, match=f"rollout_tensor: found {sampler_tensor} .* accepted: 0, 1, 2, 4, 8, 16$"):
            make_meshes(MeshSection(1, -1, 1, rollout_tensor=sampler_tensor), devices)
    assert make_meshes(MeshSection(1, -1, 2, rollout_tensor=2), devices)[1].devices.shape == (1, 8, 2)


def test_heads_that_tensor_does_not_divide_are_refused_with_the_accepted_sizes():
    """14 query heads are not split over 4 devices."""
    check_heads(abstract_mesh(1, 4, 7), 14)
    with pytest.raises(UserError, match="config.mesh.tensor: found 4, accepted for 14 query heads: 1, 2, 7, 14$"):
        check_heads(abstract_mesh(1, 4, 4), 14)
    with pytest.raises(UserError, match="config.mesh.rollout_tensor: found 4, accepted for 14 query heads"):
        check_heads(abstract_mesh(1, 4, 4), 14, "rollout_tensor")


def test_rows_that_the_mesh_does_not_divide_are_refused():
    """The message names the field and the number that divides the rows."""
    check_rows(abstract_mesh(1, 8, 2), rollout__slots=16)
    with pytest.raises(UserError, match="config.rollout.slots: found 12, accepted: a multiple of 8 = 16 devices"):
        check_rows(abstract_mesh(1, 8, 2), rollout__slots=12)


def test_an_axis_that_does_not_divide_stays_whole():
    """2 kv heads over a tensor axis of 4 are replicated, as decoding needs; nothing else changes."""
    mesh = abstract_mesh(2, 2, 4)
    axes = ("layers", "embed", "kv_heads", None)
    assert spec(axes, STORAGE, mesh, (3, 64, 2, 16)) == PartitionSpec(None, "fsdp", None, None)
    assert spec(axes, STORAGE, mesh, (3, 64, 8, 16)) == PartitionSpec(None, "fsdp", "tensor", None)
    assert spec(axes, SAMPLING, mesh, (3, 64, 8, 16)) == PartitionSpec(None, None, "tensor", None)
    assert spec(("rows", None), COMPUTE, mesh, (8, 3)) == PartitionSpec(("data", "fsdp"), None)
    assert spec(("rows", None), COMPUTE, mesh, (3, 3)) == PartitionSpec(None, None)


def test_one_mesh_axis_never_splits_two_dimensions():
    """The message names the axes."""
    with pytest.raises(ValueError, match="tensor.*two dimensions"):
        spec(("heads", "mlp"), STORAGE, abstract_mesh(1, 2, 2), (4, 4))


def test_every_parameter_gets_the_sharding_of_its_own_axes():
    """Parameters are split by their logical axes."""
    params = random_params(tiny_config(tied=False))
    places = dict(nnx.to_flat_state(param_shardings(params, STORAGE, abstract_mesh(2, 2, 2))))
    specs = {path[-1]: places[path].get_value().spec for path, _ in nnx.to_flat_state(params)}
    assert specs["embedding"] == PartitionSpec("tensor", "fsdp")
    assert specs["lm_head"] == PartitionSpec("fsdp", "tensor")
    assert specs["o_kernel"] == PartitionSpec(None, "tensor", None, "fsdp")
    assert specs["down_kernel"] == PartitionSpec(None, "tensor", "fsdp")
    assert specs["final_norm"] == PartitionSpec(None)
    assert len(specs) == len(jax.tree.leaves(decoder.abstract_params(tiny_config(tied=False))[1]))


def test_constrain_needs_no_mesh_and_takes_one():
    """Without a mesh `constrain` does nothing, with one it shards."""
    x = jax.numpy.ones((2, 3))
    assert constrain(x, "rows", None) is x
    mesh = one_device_mesh()
    with jax.set_mesh(mesh):
        pinned = jax.jit(lambda a: constrain(a, "rows", None))(x)
    assert pinned.sharding.is_equivalent_to(rows_sharding(mesh, 2), 2)
