"""Floating point operations and cycles read from compiled modules."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import CompilerError
from autoshard.verify import compiled_kernels, dot_flops

BF16 = jnp.bfloat16


def module(entry: str, *computations: str) -> str:
    """An HLO text with this entry."""
    return "\n\n".join(("HloModule m", *computations, f"ENTRY %main (p: f32[]) -> f32[] {{\n{entry}\n}}")) + "\n"


def compiled(fn, *shapes) -> str:
    """The text of a program compiled for the CPU."""
    return jax.jit(fn).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text() or ""


def test_matrix_products():
    """Batch, rows, columns and contraction, twice."""
    text = compiled(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (3, 64, 65), (3, 65, 66))
    assert dot_flops(text).total == 2 * 3 * 64 * 65 * 66


def test_loops_count_their_trips():
    """A product in a scan counts once a step."""
    text = compiled(lambda w, x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0], (64, 64), (32, 64))
    assert dot_flops(text).total == 7 * 2 * 32 * 64 * 64


@pytest.mark.parametrize(
    ("strides", "padding", "dilation", "groups", "met"),
    [
        ((1, 1), "VALID", (1, 1), 1, 6 * 3),
        ((1, 1), "SAME", (1, 1), 1, 8 * 3 - 2),  # the outermost windows read one pixel of padding
        ((2, 2), "VALID", (1, 1), 1, 3 * 3),
        ((1, 1), ((0, 0), (0, 0)), (2, 2), 1, 3 * 2 + 2 * 1),  # 4 pixels spread to 7: of 5 windows 3 begin on one and meet two, 2 meet one
        ((1, 1), "SAME", (1, 1), 2, 8 * 3 - 2),
    ],
)
def test_convolutions_count_what_windows_meet(strides, padding, dilation, groups, met):
    """Neither padding nor the holes of a dilated image are multiplied; a group reads its own channels."""
    image = 8 // dilation[0]

    def conv(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, k, strides, padding, lhs_dilation=dilation, dimension_numbers=numbers, feature_group_count=groups
        )

    text = compiled(conv, (5, image, image, 4), (3, 3, 4 // groups, 6))
    assert dot_flops(text).total == 2 * 5 * 6 * (4 // groups) * met**2


def convolution(image: int, kernel: int, result: int, window: str) -> str:
    """One along a line, of one batch and one feature."""
    return module(f"""  %x = f32[1,{image},1] parameter(0)
  %k = f32[{kernel},1,1] parameter(1)
  ROOT %c = f32[1,{result},1] convolution(%x, %k), window={{size={kernel} {window}}}, dim_labels=b0f_0io->b0f""")


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    stride=st.integers(1, 4),
    before=st.integers(-4, 9),
    steps=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_windows_count_what_they_meet(sizes, stride, before, steps):
    """Any sizes, strides, paddings and dilations: as counted one by one."""
    image, kernel, result = sizes
    elements = {at * steps[0] for at in range(image)}
    met = sum(at * stride + over * steps[1] - before in elements for at in range(result) for over in range(kernel))
    text = convolution(image, kernel, result, f"stride={stride} pad={before}_0 lhs_dilate={steps[0]} rhs_dilate={steps[1]}")
    assert dot_flops(text).total == 2 * met


@pytest.mark.slow
def test_long_windows():
    """XLA:TPU spells a batch of a product as a window of as many positions: they are not walked in pairs."""
    size = 2**24
    assert dot_flops(convolution(size, size, size, f"pad={size - 1}_0")).total == size * (size + 1)


def test_products_that_the_tpu_spells_as_windows():
    """A batch dimension in a padded window adds nothing; recorded from XLA:TPU (libtpu 0.0.42), shortened."""
    fused = """%fused_computation.1 (a: bf16[8,1024,1024,1,1], b: bf16[1024,3,16,64,1]) -> bf16[8,1024,3,16,64] {
  %a = bf16[8,1024,1024,1,1]{2,1,4,3,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[1024,3,16,64,1]{0,3,2,1,4:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.69 = bf16[8,1024,3,16,64]{1,4,3,2,0:T(8,128)(2,1)} convolution(%a, %b), window={size=1x3x16 pad=0_0x2_2x15_15 \
rhs_reversal=0x1x1}, dim_labels=0bf12_i12o0->0b12f
}"""
    entry = """  %a = bf16[8,1024,1024,1,1]{2,1,4,3,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[1024,3,16,64,1]{0,3,2,1,4:T(8,128)(2,1)} parameter(1)
  ROOT %NAME = bf16[8,1024,3,16,64]{1,4,3,2,0} fusion(%a, %b), kind=kOutput, calls=%fused_computation.1, \
backend_config={"estimated_cycles":"1234"}"""
    product = 2.0 * 8 * 1024 * 1024 * 3 * 16 * 64
    once, again = (dot_flops(module(entry.replace("NAME", name), fused)) for name in ("fusion.2", "fusion.2.remat"))
    assert (once.total, once.rematerialised) == (product, 0.0)
    assert (again.total, again.rematerialised) == (product, product)
    cycles = (entry, entry.replace("1234", str(2**63 - 1)))  # of which the other is for what the compiler has no estimate for
    assert [compiled_kernels(module(each, fused))[0].cycles for each in cycles] == [1234, 0]


CUBLAS = """  %a = bf16[8,1024,64]{2,1,0} parameter(0)
  %b = bf16[8,512,64]{2,1,0} parameter(1)
  ROOT %c = (bf16[8,1024,512]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config=\
{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],\
"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}"""


@pytest.mark.parametrize(("rows", "other", "made"), [("[64,32]", "[4,32,16]", "[64,16]"), ("[64,32]", "[64,16]", "[4,32,16]")])
def test_kernels_of_grouped_products(rows, other, made):
    """XLA:TPU's kernel on v5p visits blocks of rows: here 8, and those of two groups three times more."""
    operands = ["%n = s32[1] parameter(0)", "%s = s32[5] parameter(1)", "%v = s32[11] parameter(2)"]
    operands += [f"%x = bf16{rows} parameter(3)", f"%w = bf16{other} parameter(4)"]
    call = f'ROOT %ragged-dot-none = bf16{made} custom-call(%n, %s, %v, %v, %n, /*index=5*/%x, %w), custom_call_target="tpu_custom_call"'
    text = module("\n".join(f"  {line}" for line in (*operands, call + ', frontend_attributes={ragged_dot_tiling="8,32,16"}')))
    assert dot_flops(text).total == 2 * 11 * 8 * 32 * 16


def test_library_products():
    """cuBLAS says what it contracts, and returns its workspace too; recorded from XLA:GPU (jaxlib 0.10.2), shortened."""
    assert dot_flops(module(CUBLAS)).total == 2 * 8 * 1024 * 512 * 64


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("Forward", ("128,57,57,64", "32,3,3,64"), "128,28,28,32"),
        ("BiasActivationForward", ("128,57,57,64", "32,3,3,64"), "128,28,28,32"),
        ("BackwardInput", ("128,28,28,32", "32,3,3,64"), "128,57,57,64"),
        ("BackwardFilter", ("128,57,57,64", "128,28,28,32"), "32,3,3,64"),
    ],
)
def test_library_convolutions(target, operands, result):
    """cuDNN's four calls name image, kernel and result by their dimensions, and take as much; recorded likewise."""
    one, two = operands
    text = f"""  %a = bf16[{one}]{{3,2,1,0}} parameter(0)
  %b = bf16[{two}]{{3,2,1,0}} parameter(1)
  ROOT %c = (bf16[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3 stride=2x2}}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$conv{target}"
"""
    assert dot_flops(module(text)).total == 2 * 128 * 28 * 28 * 32 * 9 * 64


# XLA:GPU (jaxlib 0.10.2) pads what cuDNN could not: an image at one end; its gradient is made as large, and sliced.
PADDED = """%fused_pad (p: f32[4,56,56,8]) -> bf16[4,57,57,8] {
  %p = f32[4,56,56,8]{3,2,1,0} parameter(0)
  %q = bf16[4,56,56,8]{3,2,1,0} convert(%p)
  %z = bf16[] constant(0)
  ROOT %pad = bf16[4,57,57,8]{3,2,1,0} pad(%q, %z), padding=0_0x1_0x1_0x0_0
}"""
SLICED = """%fused_slice (p: bf16[4,57,57,8]) -> bf16[4,56,56,8] {
  %p = bf16[4,57,57,8]{3,2,1,0} parameter(0)
  ROOT %s = bf16[4,56,56,8]{3,2,1,0} slice(%p), slice={[0:4], [1:57], [1:57], [0:8]}
}"""
# And it fills the image of a transposed convolution's gradient with zeros, transposed.
DILATED = """%fused_transpose (p: bf16[4,16,16,8]) -> (bf16[8,31,31,4], bf16[4]) {
  %p = bf16[4,16,16,8]{3,2,1,0} parameter(0)
  %z = bf16[] constant(0)
  %pad = bf16[4,31,31,8]{3,2,1,0} pad(%p, %z), padding=0_0_0x0_0_1x0_0_1x0_0_0
  %t = bf16[8,31,31,4]{3,2,1,0} transpose(%pad), dimensions={3,1,2,0}
  %o = bf16[4]{0} constant({...})
  ROOT %both = (bf16[8,31,31,4]{3,2,1,0}, bf16[4]{0}) tuple(%t, %o)
}"""


@pytest.mark.parametrize(
    ("target", "operands", "result", "after"),
    [
        ("Forward", ("%padded", "%kernel"), "4,28,28,16", ""),
        ("BackwardFilter", ("%padded", "%gradient"), "16,2,2,8", ""),
        ("BackwardInput", ("%gradient", "%kernel"), "4,57,57,8", "SLICED"),
    ],
)
def test_library_convolutions_of_padded_images(target, operands, result, after):
    """What was padded beforehand does not count, of an image, its gradient and the kernel's alike: one of 28 windows meets padding."""
    made = f"(bf16[{result}]{{3,2,1,0}}, u8[0]{{0}})"
    text = f"""  %x = f32[4,56,56,8]{{3,2,1,0}} parameter(0)
  %kernel = bf16[16,2,2,8]{{3,2,1,0}} parameter(1)
  %gradient = bf16[4,28,28,16]{{3,2,1,0}} parameter(2)
  %padded = bf16[4,57,57,8]{{3,2,1,0}} fusion(%x), kind=kLoop, calls=%fused_pad
  %c = {made} custom-call({", ".join(operands)}), window={{size=2x2 stride=2x2}}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$conv{target}"
  %g = bf16[{result}]{{3,2,1,0}} get-tuple-element(%c), index=0
  ROOT %s = bf16[4,56,56,8]{{3,2,1,0}} fusion({"%g" if after else "%padded"}), kind=kLoop, calls=%fused_slice"""
    assert dot_flops(module(text, PADDED, SLICED)).total == 2 * 4 * 16 * 8 * (28 * 2 - 1) ** 2


def test_library_convolutions_of_dilated_images():
    """Zeros between an image's elements do not count either, wherever the image lies then: of three windows of 16 elements two meet 15."""
    text = """  %x = bf16[4,16,16,8]{3,2,1,0} parameter(0)
  %gradient = bf16[6,31,31,4]{3,2,1,0} parameter(1)
  %both = (bf16[8,31,31,4]{3,2,1,0}, bf16[4]{0}) fusion(%x), kind=kInput, calls=%fused_transpose
  %dilated = bf16[8,31,31,4]{3,2,1,0} get-tuple-element(%both), index=0
  ROOT %c = (bf16[6,3,3,8]{3,2,1,0}, u8[0]{0}) custom-call(%gradient, %dilated), window={size=31x31 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
"""
    assert dot_flops(module(text, DILATED)).total == 2 * 6 * 8 * 4 * 46**2


def test_library_products_of_padded_matrices():
    """XLA:GPU pads bfloat16 matrices to multiples of eight for cuBLAS: what it pads, and cuts off again, does not count."""
    entry = """  %a = bf16[8,49,28]{2,1,0} parameter(0)
  %b = bf16[8,51,28]{2,1,0} parameter(1)
  %zero = bf16[] constant(0)
  %left = bf16[8,56,32]{2,1,0} pad(%a, %zero), padding=0_0x0_7x0_4
  %right = bf16[8,56,32]{2,1,0} pad(%b, %zero), padding=0_0x0_5x0_4
  %call = (bf16[8,56,56]{2,1,0}, s8[4194304]{0}) custom-call(%left, %right), custom_call_target="__cublas$lt$matmul", backend_config=\
{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],\
"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}
  %made = bf16[8,56,56]{2,1,0} get-tuple-element(%call), index=0
  ROOT %kept = bf16[8,49,51]{2,1,0} slice(%made), slice={[0:8], [0:49], [0:51]}"""
    assert dot_flops(module(entry)).total == 2 * 8 * 49 * 51 * 28


def test_library_calls_without_sizes_are_an_error():
    """A matrix product that cannot be read is not counted as nothing."""
    with pytest.raises(CompilerError, match="cublasGemm"):
        dot_flops(module('  ROOT %a = f32[8]{0} custom-call(), custom_call_target="cublasGemm"'))
    with pytest.raises(CompilerError, match="which dimensions it contracts"):
        dot_flops(module('  ROOT %a = f32[8]{0} custom-call(), custom_call_target="__cublas$gemm"'))


def test_fused_attention_of_a_library_counts_apart():
    """cuDNN's attention is a kernel: its work is not among the products that are compared."""
    assert dot_flops(module('  ROOT %a = bf16[8]{0} custom-call(), custom_call_target="__cudnn$fmhaSoftmaxBackward"')).total == 0


def test_what_a_program_pads_itself_counts():
    """A convolution pads in its window: zeros that stand before it are the program's own, on TPUs too, where products are spelled so."""
    text = """  %x = f32[4,56,56,8]{3,2,1,0} parameter(0)
  %kernel = bf16[16,2,2,8]{3,2,1,0} parameter(1)
  %padded = bf16[4,57,57,8]{3,2,1,0} fusion(%x), kind=kLoop, calls=%fused_pad
  ROOT %c = bf16[4,28,28,16]{3,2,1,0} convolution(%padded, %kernel), window={size=2x2 stride=2x2}, dim_labels=b01f_o01i->b01f"""
    assert dot_flops(module(text, PADDED)).total == 2 * 4 * 16 * 8 * (28 * 2) ** 2


def test_products_that_a_compiler_makes_of_a_transform_are_none_of_the_program():
    """XLA:TPU multiplies by the matrix of a Fourier transform, under names that JAX gives no product."""
    products = """HloModule jit_f
ENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %p = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/shard_map/NAME"}
}
"""
    found = {name: dot_flops(products.replace("NAME", name)).total for name in ("dot_general", "dot.10", "jit(fft)", "fft/dot_general")}
    assert found == {"dot_general": 2 * 8**3, "dot.10": 0, "jit(fft)": 0, "fft/dot_general": 2 * 8**3}
