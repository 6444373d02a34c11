"""Costs of programs compiled for an absent TPU, compared with values worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

from psearch_jax.planning.hlo import Cost, cost

L, R, D = 6, 256, 1024  # loops, rows, width


@pytest.fixture(scope="module")
def counted():
    """Function that gives the cost of a function of bfloat16 arrays of the given shapes on one v5e chip."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
    from psearch_jax.planning.targets import tpu_target

    device = jax.sharding.SingleDeviceSharding(tpu_target("v5e:2x2").devices[0])

    def count(function, *shapes, donate=()):
        arrays = [jax.ShapeDtypeStruct(s, jnp.int32 if s == () else jnp.bfloat16, sharding=device) for s in shapes]
        return cost(jax.jit(function, donate_argnums=donate).lower(*arrays).compile().as_text())

    return count


def test_a_loop_counts_by_its_turns(counted):
    """A model of 28 layers costs as much as one layer, or every layer counts as loading the weights of all."""

    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    measured = counted(layers, (R, D), (L, D, D))
    assert measured.flops == L * 2 * R * D * D and measured.turn_flops == 0
    assert L * D * D * 2 < measured.bytes < 1.2 * L * D * D * 2


def test_a_gradient_that_computes_anew(counted):
    """The FLOPs of recomputation are missed: the reason for counting at all."""

    def loss(weights, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    measured = counted(jax.grad(loss), (L, D, D), (R, D))
    assert measured.flops == pytest.approx(4 * L * 2 * R * D * D, rel=0.1)


def test_a_loop_that_counts_by_twos(counted):
    """A product that XLA unrolled, as it does with those that gather an operand in the loop, counts twice."""

    def steps(x, w):
        return jax.lax.while_loop(lambda s: s[0] < 2 * L - 1, lambda s: (s[0] + 2, s[1] @ w), (0, x))[1]

    measured = counted(steps, (R, D), (D, D))
    assert measured.flops == L * 2 * R * D * D and measured.turn_flops == 0


def test_a_loop_without_a_known_end_is_told_apart(counted):
    """A decode step is hidden in the cost of a call whose length is unknown."""

    def until(x, w, n):
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w), (0, x @ w))[1]

    measured = counted(until, (R, D), (D, D), ())
    assert measured.flops == measured.turn_flops == 2 * R * D * D


def test_a_write_in_place_is_what_is_written(counted):
    """A cache of gigabytes counts in full for every position that is written to it or sliced from it."""
    S = 4096

    def write_line(cache, line, at):
        return jax.lax.dynamic_update_slice(cache, line, (0, at, 0))

    measured = counted(write_line, (8, S, D), (8, 8, D), (), donate=(0,))
    assert measured.bytes <= 4 * 8 * 8 * D * 2

    def read_slice(cache, at):
        return jax.lax.dynamic_slice(cache, (0, at, 0), (8, 8, D)) * 2

    assert counted(read_slice, (8, S, D), ()).bytes <= 4 * 8 * 8 * D * 2


def test_products_of_many_pairs(counted):
    """A TPU compiler writes batched products as convolutions; their padding, never multiplied, counts as FLOPs."""

    def pairs(x, y):
        return jnp.einsum("bij,bjk->bik", x, y)

    measured = counted(pairs, (7, R, 384), (7, 384, 128))
    assert measured.flops == 7 * 2 * R * 384 * 128


def test_forms_that_few_programs_have():
    """The cost of a prefetched weight, a conditional's branch, or a loop with only a bound on its end is wrong."""
    text = """
%sum (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%five, %a), direction=LT
}
%small (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%x)
}
%large (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  %m = f32[8]{0} negate(%y)
  ROOT %o = f32[8]{0} negate(%m)
}
ENTRY %main (p: bf16[4,512], q: f32[8], i: s32[]) -> f32[8] {
  %p = bf16[4,512]{1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  %s = ((bf16[4,512]{1,0}), bf16[1,512]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%p), slice={[0:1], [0:512]}
  %d = bf16[1,512]{1,0:T(8,128)S(1)} slice-done(%s)
  %c = f32[8]{0} conditional(%i, %q, %q), branch_computations={%small, %large}
  ROOT %w = f32[8]{0} while(%c), condition=%sum, body=%small
}
"""
    assert cost(text) == Cost(0.0, 1024 + 4 * 32, 0.0, 2 * 32 + 4 + 1 + 4)


def test_a_kernel_counts_as_it_declares():
    """A custom kernel, which XLA does not look into, costs nothing."""
    text = """
ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %k = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"70","transcendentals":"3","bytes_accessed":"9"}}}
}
"""  # noqa: E501
    assert cost(text) == Cost(70.0, 9.0)
    plain = text.replace("cost_estimate", "other").replace("%p), custom", "%p), frontend_attributes={}, custom")
    assert cost(plain) == Cost(0.0, 2 * 8 * 128 * 2)
    on_chip = plain.replace("(2,1)} parameter", "(2,1)S(1)} parameter")
    assert cost(on_chip) == Cost(0.0, 8 * 128 * 2)
