"""Costs of programs that are known by hand, compiled for a TPU that is not there."""

import jax
import jax.numpy as jnp
import pytest

from psearch_jax.hlo import Cost, cost

L, R, D = 6, 256, 1024  # loops, rows, width


@pytest.fixture(scope="module")
def counted():
    """The cost of a function of arrays of the given shapes, in bfloat16, on one chip of v5e."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
    from psearch_jax.planning.targets import tpu_target

    device = jax.sharding.SingleDeviceSharding(tpu_target("v5e:2x2").devices[0])

    def count(function, *shapes, donate=()):
        arrays = [jax.ShapeDtypeStruct(s, jnp.int32 if s == () else jnp.bfloat16, sharding=device) for s in shapes]
        return cost(jax.jit(function, donate_argnums=donate).lower(*arrays).compile().as_text())

    return count


def test_a_loop_counts_by_its_turns(counted):
    """A model of 28 layers that costs as much as one, or a layer's weights read as all of them."""

    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    found = counted(layers, (R, D), (L, D, D))
    assert found.flops == L * 2 * R * D * D and found.turn_flops == 0
    assert L * D * D * 2 < found.bytes < 1.2 * L * D * D * 2


def test_a_gradient_that_computes_anew(counted):
    """FLOPs of a recomputation that are not seen: the reason for counting at all."""

    def loss(weights, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    found = counted(jax.grad(loss), (L, D, D), (R, D))
    assert found.flops == pytest.approx(4 * L * 2 * R * D * D, rel=0.1)


def test_a_loop_that_counts_by_twos(counted):
    """A product that XLA unrolled, as those that gather their operand on the way, counted twice."""

    def steps(x, w):
        return jax.lax.while_loop(lambda s: s[0] < 2 * L - 1, lambda s: (s[0] + 2, s[1] @ w), (0, x))[1]

    found = counted(steps, (R, D), (D, D))
    assert found.flops == L * 2 * R * D * D and found.turn_flops == 0


def test_a_loop_without_a_known_end_is_told_apart(counted):
    """A decode step hidden in a call whose length nobody knows."""

    def until(x, w, n):
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w), (0, x @ w))[1]

    found = counted(until, (R, D), (D, D), ())
    assert found.flops == found.turn_flops == 2 * R * D * D


def test_a_write_in_place_is_what_is_written(counted):
    """A cache of gigabytes counted at every position that is written to it, or a slice of it as the whole."""
    S = 4096

    def put(cache, line, at):
        return jax.lax.dynamic_update_slice(cache, line, (0, at, 0))

    found = counted(put, (8, S, D), (8, 8, D), (), donate=(0,))
    assert found.bytes <= 4 * 8 * 8 * D * 2

    def look(cache, at):
        return jax.lax.dynamic_slice(cache, (0, at, 0), (8, 8, D)) * 2

    assert counted(look, (8, S, D), ()).bytes <= 4 * 8 * 8 * D * 2


def test_products_of_many_pairs(counted):
    """Batched products, which a TPU's compiler writes as convolutions over padding that is never multiplied."""

    def pairs(x, y):
        return jnp.einsum("bij,bjk->bik", x, y)

    found = counted(pairs, (7, R, 384), (7, 384, 128))
    assert found.flops == 7 * 2 * R * 384 * 128


def test_forms_that_few_programs_have():
    """A weight fetched ahead that counts nothing, a branch that is not taken, a loop whose end is only bounded."""
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
    """What XLA does not look into would cost nothing."""
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
