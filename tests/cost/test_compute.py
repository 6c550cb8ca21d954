"""Work of ops, and the roofline."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cluster import CATALOGUE
from autoshard.cluster.catalogue import HOPPER_EFFICIENCY
from autoshard.cost.compute import Roofline, op_flops
from autoshard.errors import ClusterError
from autoshard.ir import Factor, Op, Origin, Rule, Value
from autoshard.primitives import PRIMITIVES, is_matrix


def ops_of(function, *shapes, dtype=jnp.float32):
    """The equations of a function as ops, nested calls inlined."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr")
            if eqn.primitive.name in ("jit", "pjit"):
                visit(inner.jaxpr)
                continue
            values = [Value(tuple(v.aval.shape), str(v.aval.dtype), np.dtype(v.aval.dtype).itemsize) for v in (*eqn.invars, *eqn.outvars)]
            n = len(eqn.invars)
            op = Op(0, eqn.primitive.name, tuple(range(n)), tuple(range(n, len(values))), eqn.params, Origin(), (0,))
            found.append((op, tuple(values)))

    visit(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).jaxpr)
    return found


def flops(function, *shapes, dtype=jnp.float32):
    """Per primitive the work of a function."""
    return {op.primitive: op_flops(op, None, values) for op, values in ops_of(function, *shapes, dtype=dtype)}


@pytest.mark.parametrize(
    ("function", "shapes", "primitive", "work"),
    [
        (lambda x, y: x @ y, [(8, 16), (16, 4)], "dot_general", 2 * 8 * 16 * 4),
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), [(3, 8, 16), (3, 4, 16)], "dot_general", 2 * 3 * 8 * 4 * 16),
        (lambda x, y: lax.conv(x, y, (2, 2), "VALID"), [(2, 3, 9, 9), (5, 3, 3, 3)], "conv_general_dilated", 2 * 2 * 5 * 4 * 4 * 27),
        (
            lambda x, y: lax.conv_general_dilated(x, y, (1,), "SAME", feature_group_count=6),
            [(2, 6, 10), (6, 1, 3)],
            "conv_general_dilated",
            2 * 2 * 6 * (3 * 10 - 2),  # the window's ends meet padding once each
        ),
        (jnp.tanh, [(8, 8)], "tanh", 64),
        (lambda x: x.sum(0), [(8, 4)], "reduce_sum", 32),
        (lambda x: jnp.argmax(x, 1), [(8, 4)], "argmax", 32),
        (lambda x: lax.sort(x, dimension=1), [(2, 8)], "sort", 16 * 3),
        (lambda x: lax.top_k(x, 4), [(2, 8)], "top_k", 16 * 2),
        (lambda x: lax.cumsum(x), [(8, 4)], "cumsum", 32),
        (lambda x: jnp.fft.fft(x.astype(jnp.complex64)), [(4, 16)], "fft", 4 * 5 * 16 * 4),
        (lambda x: jnp.fft.rfft(x), [(4, 16)], "fft", 4 * 5 * 16 * 4 / 2),
        (lambda x: lax.linalg.cholesky(x), [(2, 6, 6)], "cholesky", 2 * 72),
        (lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True), [(6, 6), (6, 2)], "triangular_solve", 72),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"), [(5, 5)], "reduce_window_sum", 64),
        (lambda x, y: x.at[jnp.arange(3)].add(y), [(8, 4), (3, 4)], "scatter-add", 12),
        (lambda x, y: x.at[jnp.arange(3)].max(y), [(8, 4), (3, 4)], "scatter-max", 12),
        (lambda x, y: x.at[jnp.arange(3)].multiply(y), [(8, 4), (3, 4)], "scatter-mul", 12),
        (lambda x: x.reshape(4, 16).T, [(8, 8)], "transpose", 0),
        (lambda x: lax.reduce_precision(x, 8, 7), [(8, 8)], "reduce_precision", 64),
    ],
)
def test_work(function, shapes, primitive, work):
    """Each family counts what its algorithm does."""
    assert flops(function, *shapes)[primitive] == pytest.approx(work)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_a_convolution_and_its_gradients_count_alike(stride, padding):
    """Every product of an image's and a kernel's element is needed once in each, and neither padding nor holes are multiplied."""

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (stride, 2), padding, rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC"))

    shapes = (2, 13, 16, 3), (3, 2, 3, 5)
    forward = flops(convolve, *shapes)["conv_general_dilated"]
    for argument in (0, 1):
        backward = ops_of(jax.grad(lambda x, w: convolve(x, w).sum(), argument), *shapes)
        counts = [op_flops(op, None, values) for op, values in backward if op.primitive == "conv_general_dilated"]
        assert set(counts) == {forward}


def test_ragged_products_count_each_row_once():
    """Groups of rows share the work of one product."""
    found = flops(lambda x, y: lax.ragged_dot(x, y, jnp.array([4, 4], jnp.int32)), (8, 16), (2, 16, 4))
    assert found[next(name for name in found if name.startswith("ragged_dot"))] == 2 * 8 * 16 * 4


def test_unknown_reductions_count_their_iteration_space():
    """Where no formula fits, a rule with a reduction says how many points there are."""
    values = (Value((8, 16), "float32", 4), Value((8,), "float32", 4))
    op = Op(0, "novel", (0,), (1,), {}, Origin(), (0,))
    rule = Rule((Factor(8), Factor(16, "reduction", "sum")), (((0,), (1,)),), (((0,),),))
    assert (op_flops(op, None, values), op_flops(op, rule, values)) == (8, 128)


def test_which_primitives_use_the_matrix_unit():
    """Products and convolutions do, and nothing that is free does."""
    assert is_matrix("dot_general") and is_matrix("conv_general_dilated") and not is_matrix("tanh")
    assert not any(is_matrix(name) for name, each in PRIMITIVES.items() if each.work == "none")


@pytest.mark.parametrize("name", CATALOGUE)
def test_large_products_run_at_peak_and_small_ones_pay_for_padding(name):
    """Tiles are filled by large sizes; cutting a side below the tile saves nothing."""
    device = CATALOGUE[name].device
    roofline = Roofline(device)
    large = roofline.dot_seconds(1, 8192, 8192, 8192, "bfloat16", 3 * 2 * 8192**2)
    assert large == pytest.approx(2 * 8192**3 / device.matrix_rate("bfloat16"), rel=0.03)  # GPUs: a wave of 60 is 1.5 % of it
    tile = device.matrix_tile
    depth = [roofline.dot_seconds(1, 4096, 4096, k, "bfloat16", 0.0) for k in (max(tile // 2, 1), tile)]
    assert depth[0] == pytest.approx(depth[1]) if tile > 1 else depth[0] == depth[1]


def test_efficiencies_slow_products_and_memory_down():
    """A device that reaches a share of its peaks takes so much longer."""
    device = CATALOGUE["v5e"].device
    half = Roofline(replace(device, matrix_efficiency=0.5, memory_efficiency=0.25, kernel_overhead_seconds=0.0))
    assert half.seconds(True, 197e12, "bfloat16", 0.0) == pytest.approx(2)
    assert half.seconds(False, 0.0, "float32", 819e9) == pytest.approx(4)
    with pytest.raises(ClusterError, match="efficiencies"):
        replace(device, matrix_efficiency=1.5)


def test_roofline_is_the_slower_side_and_vectorises():
    """Arithmetic or memory decides, each kernel has a fixed cost, and arrays go elementwise."""
    device = CATALOGUE["v5e"].device
    roofline = Roofline(device)
    assert roofline.seconds(False, 0.0, "float32", device.memory_rate) == pytest.approx(1 + device.kernel_overhead_seconds)
    assert roofline.seconds(True, device.matrix_rate("bfloat16"), "bfloat16", 0.0) == pytest.approx(1 + device.kernel_overhead_seconds)
    flops, nbytes = np.array([1e9, 1e12]), np.array([1e9, 1e6])
    both = roofline.seconds(False, flops, "float32", nbytes)
    assert both.tolist() == [roofline.seconds(False, f, "float32", b) for f, b in zip(flops, nbytes, strict=True)]
    m = np.array([8, 4096])
    assert roofline.dot_seconds(1, m, 128, 128, "bfloat16", 0.0).tolist() == [
        roofline.dot_seconds(1, each, 128, 128, "bfloat16", 0.0) for each in m
    ]


# Measured products: (products, m, n, k, Tflop/s). cuBLAS, float16, A100: triton-lang/triton issue 3551. H100, bfloat16: XLA's own table
# (openxla/xla, service/gpu/model/matmul_interpolator_data.h, sm_90).
MEASURED = {
    "a100": [
        (1, 1024, 1024, 1024, 104.9), (1, 1280, 1280, 1280, 157.5), (1, 1536, 1536, 1536, 176.9), (1, 1792, 1792, 1792, 172.9),
        (1, 2048, 2048, 2048, 233.0), (1, 2304, 2304, 2304, 246.3), (1, 2432, 2432, 2432, 219.5), (1, 2560, 2560, 2560, 244.5),
        (1, 2688, 2688, 2688, 213.1), (1, 2944, 2944, 2944, 247.9), (1, 3072, 3072, 3072, 229.2), (1, 3200, 3200, 3200, 244.3),
    ],
    "h100": [
        (1, 512, 512, 512, 40.7), (1, 1024, 1024, 256, 82.0), (4, 512, 512, 1024, 237.1), (1, 1024, 1024, 4096, 470.1),
        (2, 2048, 1024, 512, 342.4), (1, 512, 4096, 4096, 644.1), (1, 1024, 2048, 4096, 653.5), (1, 4096, 4096, 1024, 677.4),
        (4, 2048, 1024, 256, 300.9), (2, 512, 4096, 2048, 627.2), (4, 2048, 512, 4096, 730.4), (2, 2048, 4096, 4096, 779.3),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_products_of_any_size_take_as_long_as_measured(name):
    """Waves of blocks over the multiprocessors and a kernel's fixed cost explain measured products, from slow small ones to the largest."""
    alone = {"h100": HOPPER_EFFICIENCY}.get(name, CATALOGUE[name].device.matrix_efficiency)  # in short measurements clocks are higher
    roofline = Roofline(replace(CATALOGUE[name].device, matrix_efficiency=alone))
    errors = []
    for batch, m, n, k, reached in MEASURED[name]:
        predicted = roofline.dot_seconds(batch, m, n, k, "bfloat16", 2 * batch * (m * k + k * n + m * n))
        errors.append(abs(predicted / (2 * batch * m * n * k / (reached * 1e12)) - 1))
    assert sorted(errors)[len(errors) // 2] <= 0.12 and max(errors) <= 0.35


def test_deep_sums_are_shared():
    """A convolution's gradient by its kernel has few results and sums over all pixels: multiprocessors share that, and add up in memory."""
    roofline = Roofline(replace(CATALOGUE["h100"].device, kernel_overhead_seconds=0.0))
    rate = roofline.device.matrix_rate("bfloat16")
    padded = 2 * 5 * 64 * 128 * 401_408 / rate  # five blocks of 64 x 128 hold the result
    assert padded <= roofline.dot_seconds(1, 64, 576, 401_408, "bfloat16", 0.0) <= 1.1 * padded
    alone = 132 / 5 * padded / 401_408 * 4096  # each on one of 132 multiprocessors
    assert roofline.dot_seconds(1, 64, 576, 4096, "bfloat16", 0.0) == pytest.approx(alone)
    sums = 2 * 4 * 64 * 576 * 98  # bytes of ninety-eight parts of up to 4,096, written and read
    for moved, more in ((3.35e8, sums), (4.5e9, 0)):  # nothing is shared where memory takes longer than one part
        assert roofline.dot_seconds(1, 64, 576, 401_408, "bfloat16", moved) == pytest.approx((moved + more) / roofline.device.memory_rate)


def test_one_block_too_many_takes_another_wave():
    """A product of as many blocks as there are multiprocessors takes as long as a smaller one; one more row of blocks a quarter longer."""
    device = CATALOGUE["a100"].device
    roofline = Roofline(replace(device, kernel_overhead_seconds=0.0))
    full = roofline.dot_seconds(1, 128 * 12, 256 * 9, 4096, "bfloat16", 0.0)
    assert full == pytest.approx(2 * 128 * 12 * 256 * 9 * 4096 / device.matrix_rate("bfloat16"))
    assert roofline.dot_seconds(1, 128 * 12 - 100, 256 * 9, 4096, "bfloat16", 0.0) == full
    assert roofline.dot_seconds(1, 128 * 13, 256 * 9, 4096, "bfloat16", 0.0) >= 1.25 * full
