"""The table of JAX's primitives: the kind of each, how its work is counted, and facts that analyses rely on.

Each fact is stated here alone; what a compiler does with a primitive is in `autoshard.compilers`. Names are those that JAX 0.10 traces;
`tests/test_primitives.py` compares them with its registry. A name that is not in the table is of kind ``"unknown"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal[
    "elementwise",  # an element of the result from the same element of every operand
    "rearrangement",  # the operand in another shape or order of dimensions
    "identity",  # results that are the operands, perhaps with an annotation for compilers
    "placement",  # the operand, with an annotation of its devices
    "reinterpretation",  # the operand's bits as another type
    "broadcast",  # elements repeated
    "slice",  # a part of the operand
    "reversal",
    "concatenation",  # padding included
    "stacking",  # along a new dimension, and back
    "update",  # an operand with a part overwritten
    "gather",
    "scatter",
    "reduction",  # all elements along some dimensions as one
    "cumulative",
    "window",  # pooling and its gradients
    "product",  # matrix products and convolutions: what matrix units compute
    "sort",
    "selection",  # the largest elements
    "fourier",
    "linear_algebra",  # decompositions and solvers of matrices
    "random",
    "creation",  # results of no operand
    "loop",
    "branch",
    "call",  # one body that runs once, as an op of its own
    "inlined_call",  # a body that is inlined into the program around it
    "custom_rule",  # an inlined call with a custom derivative or batching rule
    "self_partitioned",  # with its own sharding
    "kernel",  # user code that is opaque to compilers
    "library",  # a vendor's kernel
    "callback",  # into Python
    "collective",
    "unknown",
]

Work = Literal[
    "none",  # no arithmetic
    "results",  # one operation for each element of the largest result, or with a reduction for each point of the iteration space
    "operand",  # one for each element of the first operand
    "dot",
    "ragged_dot",
    "convolution",
    "window",
    "scattered_window",
    "updates",
    "comparisons",
    "heap",
    "butterflies",
    "factorisation",
    "substitution",
    "threefry",
]

Linear = Literal[
    "",
    "adds",  # the sum of two operands
    "scales",  # a multiple of an operand, where the other one is a scalar
    "carries",  # the elements of the operand, dimension by dimension
    "regroups",  # the elements of the operand, its dimensions merged or split
]


@dataclass(frozen=True, slots=True)
class Primitive:
    """The facts of a primitive.

    Attributes:
        kind: one of `Kind`.
        work: how its floating point operations are counted (`autoshard.cost.compute`).
        cubic: floating point operations of a factorisation of an n x n matrix, as a multiple of n³.
        vector_operations: operations of a vector unit per element.
        operator: the operator that combines two results or updates, as in `autoshard.ir.rule`; "" where there is none.
        linear: how partial sums of an operand become partial sums of the result; "" where they do not.
        core_rank: the rank of a linear algebra primitive's first operand without batch dimensions.
        bodies: the parameters that are sub-programs, in body order.
        view: whether the result shares its operand's memory.
        anchor: whether it is never fused, so that its result is stored in memory.
        computed_once: whether its result is stored even if all its operands are constants, rather than recomputed for each reader.
        commutes_with_casts: whether compilers may cast its operands instead of its result, with equal numbers.
        moves: whether its result has the elements of its operand, rearranged or cast.
        stateful: whether it has an effect or a state, and so runs on one device.
        collective: the HLO collective that it becomes, of those that are costed.
    """

    kind: Kind
    work: Work = "results"
    cubic: float = 0.0
    vector_operations: float = 0.7
    operator: str = ""
    linear: Linear = ""
    core_rank: int = 0
    bodies: tuple[str, ...] = ()
    view: bool = False
    anchor: bool = False
    computed_once: bool = False
    commutes_with_casts: bool = False
    moves: bool = False
    stateful: bool = False
    collective: str = ""


def _each(names: str, kind: Kind, **facts: Any) -> dict[str, Primitive]:
    """The same record for several primitives."""
    return dict.fromkeys(names.split(), Primitive(kind, **facts))


# Vector operations per element. Those of a product and a sum are from the cycles that XLA:TPU (libtpu 0.0.42) estimates for long chains of
# them. The others fit which chains between two matrix products it stores in memory instead of fusing: on v5p not one division, two
# logistics or six exponentials, but a division and a sum, x * logistic(x), and an error function. A softmax in float32 is stored on v5p,
# not on v4, v5e or v6e, whose limits are higher; an error function is stored on all of them, and random bits make the difference on v6e.
#
# Casts commute with the primitives that XLA's convert-mover pass lists (openxla/xla, xla/hlo/transforms/simplifiers/convert_mover.cc);
# XLA:TPU was seen to cast embedding tables whose rows products read, and values that are compared with a bound, but not negated ones.
_ELEMENTWISE: dict[str, Primitive] = {
    **_each("cbrt", "elementwise", vector_operations=5.0),
    **_each("ceil exp2 floor mulhi nextafter round sign sub", "elementwise"),
    **_each("abs clamp", "elementwise", commutes_with_casts=True),
    **_each("neg", "elementwise", linear="carries"),
    **_each("add add_any", "elementwise", operator="sum", linear="adds"),
    **_each("mul", "elementwise", operator="prod", linear="scales", vector_operations=1.5),
    **_each("div", "elementwise", linear="scales", vector_operations=10.0),
    **_each("max", "elementwise", operator="max", commutes_with_casts=True),
    **_each("min", "elementwise", operator="min", commutes_with_casts=True),
    **_each("square", "elementwise", vector_operations=1.5),
    **_each("exp log log2 rsqrt sqrt", "elementwise", vector_operations=2.0),
    **_each("expm1 integer_pow log1p one_minus_square", "elementwise", vector_operations=3.0),
    **_each("pow", "elementwise", vector_operations=5.0),
    **_each("logistic", "elementwise", vector_operations=9.0),
    **_each("polynomial rem", "elementwise", vector_operations=10.0),
    **_each("tanh", "elementwise", vector_operations=1.0),
    **_each("cos sin tan", "elementwise", vector_operations=20.0),
    **_each("acos acosh asin asinh atan atan2 atanh cosh sinh", "elementwise"),
    **_each("erf erf_inv erfc", "elementwise", vector_operations=50.0),
    **_each("bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma", "elementwise"),
    **_each("regularized_incomplete_beta zeta", "elementwise"),
    **_each("and", "elementwise", operator="and"),
    **_each("or", "elementwise", operator="or"),
    **_each("xor", "elementwise", operator="xor"),
    **_each("select_n", "elementwise", commutes_with_casts=True),
    **_each("clz eq eq_to ge gt is_finite le le_to lt lt_to ne not population_count", "elementwise"),
    **_each("shift_left shift_right_arithmetic shift_right_logical", "elementwise"),
    **_each("complex conj imag real reduce_precision", "elementwise"),
    **_each("convert_element_type", "elementwise", work="none", linear="carries", moves=True),
    **_each("philox2x32 philox4x32 threefry4x32", "elementwise"),
    **_each("threefry2x32", "elementwise", work="threefry", vector_operations=6.0),
    **_each("random_clone random_seed", "elementwise", computed_once=True),
}

_DATA: dict[str, Primitive] = {
    **_each("transpose", "rearrangement", work="none", view=True, linear="carries", commutes_with_casts=True, moves=True),
    **_each("reshape squeeze", "rearrangement", work="none", view=True, linear="regroups", commutes_with_casts=True, moves=True),
    **_each("copy", "identity", work="none", view=True, linear="carries", commutes_with_casts=True, moves=True),
    **_each("optimization_barrier", "identity", work="none", view=True),
    **_each("name", "identity", work="none", commutes_with_casts=True),
    **_each("stop_gradient", "identity", work="none"),
    **_each("dce_sink layout_constraint preduced program_order relayout tie", "identity"),
    **_each("reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p", "identity"),
    **_each("pvary", "identity", work="none", view=True),
    **_each("shard_alike with_memory_space_constraint xla_metadata_value", "identity"),
    **_each("sharding_constraint", "placement", work="none", view=True, commutes_with_casts=True),
    **_each("reshard", "placement", work="none", view=True),
    **_each("device_put", "placement"),
    **_each("bitcast_convert_type", "reinterpretation", work="none"),
    **_each("random_unwrap random_wrap", "reinterpretation", work="none", computed_once=True),
    **_each("from_edtype to_edtype", "reinterpretation"),
    **_each("broadcast_in_dim", "broadcast", work="none", commutes_with_casts=True, moves=True),
    **_each("tile", "broadcast", work="none"),
    **_each("slice", "slice", work="none", commutes_with_casts=True, moves=True),
    **_each("dynamic_slice", "slice", work="none", commutes_with_casts=True, moves=True, computed_once=True),
    **_each("split", "slice", work="none", commutes_with_casts=True),
    **_each("rev", "reversal", work="none", commutes_with_casts=True, moves=True, computed_once=True),
    **_each("concatenate pad", "concatenation", work="none", commutes_with_casts=True, computed_once=True),
    **_each("stack", "stacking", commutes_with_casts=True),
    **_each("unstack", "stacking", commutes_with_casts=True),
    **_each("dynamic_update_slice", "update", work="none", anchor=True),
    **_each("gather", "gather", work="none", anchor=True, commutes_with_casts=True),
    **_each("scatter", "scatter", work="none", anchor=True),
    **_each("scatter-sub", "scatter", work="updates", anchor=True),  # XLA gathers the updates of a subtraction
    **_each("scatter-add", "scatter", work="updates", anchor=True, operator="sum"),
    **_each("scatter-mul", "scatter", work="updates", anchor=True, operator="prod"),
    **_each("scatter-min", "scatter", work="updates", anchor=True, operator="min"),
    **_each("scatter-max", "scatter", work="updates", anchor=True, operator="max"),
}

_OPERATORS = ("sum", "max", "min", "prod", "and", "or", "xor")

_ARRAYS: dict[str, Primitive] = {
    **{f"reduce_{operator}": Primitive("reduction", work="operand", operator=operator) for operator in _OPERATORS},
    **_each("argmax argmin", "reduction", work="operand"),
    **_each("reduce", "reduction"),
    **_each("cumlogsumexp cummax cummin cumprod cumsum", "cumulative", anchor=True),
    **_each("reduce_window reduce_window_max reduce_window_min reduce_window_sum", "window", work="window", anchor=True),
    **_each("select_and_gather_add", "window", work="window", anchor=True),
    **_each("select_and_scatter select_and_scatter_add", "window", work="scattered_window", anchor=True),
    **_each("dot_general", "product", work="dot", anchor=True),
    **_each("ragged_dot_general", "product", work="ragged_dot", anchor=True),
    **_each("conv_general_dilated", "product", work="convolution", anchor=True),
    **_each("sort", "sort", work="comparisons", anchor=True),
    **_each("top_k", "selection", work="heap", anchor=True),
    **_each("approx_top_k", "selection", work="operand", anchor=True),
    **_each("fft", "fourier", work="butterflies", anchor=True),
}

# Golub and Van Loan, Matrix Computations.
_LINEAR_ALGEBRA: dict[str, Primitive] = {
    **_each("cholesky", "linear_algebra", core_rank=2, work="factorisation", cubic=1 / 3, anchor=True),
    **_each("lu", "linear_algebra", core_rank=2, work="factorisation", cubic=2 / 3, anchor=True),
    **_each("householder_product qr", "linear_algebra", core_rank=2, work="factorisation", cubic=4 / 3, anchor=True),
    **_each("geqrf", "linear_algebra", core_rank=2, work="factorisation", cubic=4 / 3),
    **_each("eigh", "linear_algebra", core_rank=2, work="factorisation", cubic=9.0, anchor=True),
    **_each("svd", "linear_algebra", core_rank=2, work="factorisation", cubic=21.0, anchor=True),
    **_each("eig", "linear_algebra", core_rank=2, work="factorisation", cubic=25.0, anchor=True),
    **_each("triangular_solve", "linear_algebra", core_rank=2, work="substitution", anchor=True),
    **_each("tridiagonal_solve", "linear_algebra", core_rank=1, anchor=True),
    **_each("cholesky_update geqp3 hessenberg ormqr schur symmetric_product tridiagonal", "linear_algebra", core_rank=2),
    **_each("lu_pivots_to_permutation", "linear_algebra", core_rank=1),
}

_CREATION: dict[str, Primitive] = {
    **_each("random_bits", "random", work="threefry", vector_operations=6.0, computed_once=True),
    **_each("random_fold_in random_gamma random_split", "random", computed_once=True),
    **_each("rng_bit_generator", "random"),
    **_each("rng_uniform", "random", stateful=True),
    **_each("create_token empty iota", "creation", work="none"),
    **_each("after_all empty2 iota_2x32_shape", "creation"),
    **_each("axis_index", "creation", computed_once=True),
}

_PROGRAMS: dict[str, Primitive] = {
    **_each("scan", "loop", bodies=("jaxpr",), anchor=True),
    **_each("while", "loop", bodies=("cond_jaxpr", "body_jaxpr"), anchor=True),
    **_each("cond", "branch", bodies=("branches",), anchor=True),
    **_each("remat2", "call", bodies=("jaxpr",), anchor=True),  # jax.checkpoint
    **_each("custom_linear_solve", "call", bodies=("jaxprs",)),  # the solver, of its four functions
    **_each("jit", "inlined_call", bodies=("jaxpr",)),
    **_each("closed_call eval_jaxpr", "inlined_call", bodies=("call_jaxpr",)),
    **_each("custom_jvp_call custom_vjp_call", "custom_rule", bodies=("call_jaxpr",)),
    **_each("custom_vmap_call", "custom_rule", bodies=("call",)),
    **_each("linear_call", "custom_rule", bodies=("callee",)),
    **_each("custom_partitioning", "self_partitioned", anchor=True),
    **_each("shard_map", "self_partitioned", work="none", view=True, computed_once=True),  # an operand's shards, or a result of shards
    **_each("ffi_call pallas_call", "kernel", anchor=True),
    # Their work is not known; it is counted as for unknown primitives.
    **_each("cudnn_fusion scaled_dot scaled_matmul scaled_matmul_wrapper", "library"),
    **_each("dot_product_attention_fwd dot_product_attention_fwd_wrapper", "library", anchor=True),
    **_each("dot_product_attention_bwd dot_product_attention_bwd_wrapper", "library", anchor=True),
    **_each("dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper", "library"),
    **_each("dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper", "library"),
    **_each("ring_attention ring_attention_gradients", "library", anchor=True),  # autoshard.rules.ring
    **_each("pure_callback", "callback"),
    **_each("debug_callback debug_print io_callback", "callback", stateful=True),
}

# Inside a user's shard_map. Where a collective starts in one primitive and is done in another, the first counts.
_COLLECTIVES: dict[str, Primitive] = {
    name: replace(each, work="none", anchor=True, commutes_with_casts=each.collective not in ("", "all_reduce", "reduce_scatter"))
    for name, each in {
        **_each("all_gather all_gather_invariant all_gather_reduced", "collective", collective="all_gather"),
        **_each("all_gather_reduced_start all_gather_start", "collective", collective="all_gather"),
        **_each("all_to_all all_to_all_start ragged_all_to_all", "collective", collective="all_to_all"),
        **_each("ppermute ppermute_start", "collective", collective="collective_permute"),
        **_each("pmax pmin psum psum_invariant psum_invariant_start psum_start", "collective", collective="all_reduce"),
        **_each("unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start", "collective", collective="all_reduce"),
        **_each("reduce_scatter reduce_scatter_start", "collective", collective="reduce_scatter"),
        **_each("unreduced_reduce_scatter unreduced_reduce_scatter_start", "collective", collective="reduce_scatter"),
        **_each("all_gather_done all_to_all_done ppermute_done psum_done reduce_scatter_done", "collective"),
        **_each("pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start precv psend", "collective"),
    }.items()
}

PRIMITIVES: Mapping[str, Primitive] = {
    **_ELEMENTWISE,
    **_DATA,
    **_ARRAYS,
    **_LINEAR_ALGEBRA,
    **_CREATION,
    **_PROGRAMS,
    **_COLLECTIVES,
}

UNKNOWN = Primitive("unknown")


def primitive(name: str) -> Primitive:
    """The record of a primitive; `UNKNOWN` where the table has none.

    >>> primitive("reduce_max").kind, primitive("scatter-max").operator, primitive("of_my_own").kind
    ('reduction', 'max', 'unknown')
    """
    return PRIMITIVES.get(name, UNKNOWN)


def of_kind(kind: Kind) -> tuple[str, ...]:
    """The names of the primitives of a kind, in the order of the table.

    >>> of_kind("loop")
    ('scan', 'while')
    """
    return tuple(name for name, each in PRIMITIVES.items() if each.kind == kind)


def _test(fact: Callable[[Primitive], bool]) -> Callable[[str], bool]:
    """The test by name whether a primitive has a fact; in a set, since costing an assignment tests every op.

    >>> is_matrix("dot_general"), is_scatter("scatter-add"), is_scatter("reduce_scatter")
    (True, True, False)
    """
    return frozenset(name for name, each in PRIMITIVES.items() if fact(each)).__contains__


def linear(name: str) -> Linear:
    """How partial sums of an operand become partial sums of the result.

    >>> linear("transpose"), linear("div"), linear("exp")
    ('carries', 'scales', '')
    """
    return primitive(name).linear


is_matrix = _test(lambda each: each.kind == "product")  # runs on the matrix unit: products and convolutions
is_transform = _test(lambda each: each.kind == "fourier")
is_dense_product = _test(lambda each: each.kind == "product" and each.work != "ragged_dot")
is_addition = _test(lambda each: each.linear == "adds")  # adds two operands
is_view = _test(lambda each: each.view)  # the result shares its operand's memory
is_rearrangement = _test(lambda each: each.kind == "rearrangement")  # the result is the operand in another shape or order of dimensions
moves = _test(lambda each: each.moves)  # the result has the elements of the operand, rearranged or cast
is_reduction = _test(lambda each: each.kind == "reduction")  # all elements along some dimensions become one
is_scatter = _test(lambda each: each.kind == "scatter")  # updates are scattered into an operand
updates = _test(lambda each: each.kind in ("scatter", "update"))  # overwrites a part of its first operand: scatters and slice updates
# Slides a window: convolutions, pooling and its gradients.
is_windowed = _test(lambda each: each.kind == "window" or each.work == "convolution")
is_anchor = _test(lambda each: each.anchor)  # is never fused
# The result is stored even if all operands are constants, rather than recomputed for each reader.
is_computed_once = _test(lambda each: each.anchor or each.computed_once or each.kind == "reduction")
# Compilers may cast the operands instead of the result, with equal numbers.
commutes_with_casts = _test(lambda each: each.commutes_with_casts)
is_loop = _test(lambda each: each.kind == "loop")
is_control_flow = _test(lambda each: each.kind in ("loop", "branch"))
is_inlined = _test(lambda each: each.kind in ("inlined_call", "custom_rule"))  # the body is inlined into the program around it
is_call = _test(lambda each: each.kind == "call")  # is a call that stays an op: one body that runs once, whose results are the call's
has_custom_rule = _test(lambda each: each.kind == "custom_rule")  # the body has a custom derivative or batching rule
is_placement = _test(lambda each: each.kind == "placement")  # the result is the operand, with an annotation of its devices
is_stateful = _test(lambda each: each.stateful)  # has an effect or a state, and so runs on one device
is_self_partitioned = _test(lambda each: each.kind == "self_partitioned")  # has its own sharding
is_collective = _test(lambda each: each.kind == "collective")  # communicates, inside a user's shard_map
# The body is not analysed: it partitions itself, or calls a user's kernel or Python.
is_opaque = _test(lambda each: each.kind in ("self_partitioned", "kernel", "callback"))
