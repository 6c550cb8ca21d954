"""The one table of primitives: it has every primitive of JAX, nothing else, and no rival."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from jax_registry import registry

from autoshard.ir.rule import OPERATORS
from autoshard.primitives import PRIMITIVES, UNKNOWN, is_computed_once, is_matrix, is_reduction, is_scatter, of_kind, primitive, updates
from autoshard.rules import registered, ring

PACKAGE = Path(__file__).resolve().parents[1] / "autoshard"
RULES = registered()  # before a test registers one of its own

# Primitives that JAX lowers and the table leaves out: no op of a traced program is one, but for calls that stay closed.
UNCLASSIFIED = {
    "inside Pallas kernels": (
        *("bitcast", "einshape_lo", "max_contiguous", "multiple_of", "reciprocal", "remove_memory_space", "roll", "run_scoped"),
        *("custom_fusion", "fusible", "mpmd_map", "tpu_custom_call", "thunky.inline_constant"),
    ),
    "references, which a traced program has discharged": ("broadcast_to", "core_map", "create_linear", "pin", "run_state", "unpin"),
    "symbolic dimensions of jax.export, which have no size to shard": ("dim_as_value", "dimension_size", "shape_assertion"),
    "calls whose bodies no public function opens": ("call", "call_exported", "composite", "compute_on", "xla_metadata_call"),
    "steps of JAX's own transformations": ("custom_lin", "remat_opt", "stage", "unreachable"),
    "checks and views of a compiled program": ("buffer_callback", "check", "inspect_sharding"),
    "the choice among branches by platform, settled when a program is traced": ("platform_index",),
}

# Primitives that JAX has in one release and not in another, from 0.10 to 0.12.
IN_SOME_RELEASES = frozenset(
    (
        *(
            "call",
            "closed_call",
            "core_map",
            "eval_jaxpr",
            "fusible",
            "log2",
            "one_minus_square",
            "polynomial",
            "program_order",
            "relayout",
        ),
        *("pbroadcast_done", "pbroadcast_dynamic", "pbroadcast_start", "psum_start", "shard_alike", "thunky.inline_constant"),
        *("reduced_vary_cast", "reduced_vary_cast_p", "vary_unreduced_cast", "vary_unreduced_cast_p", "xla_metadata_call"),
        *("unreduced_pmax", "unreduced_pmin", "unreduced_psum_start", "unreduced_reduce_scatter_start"),
    )
)

# Primitives of this package, which only its rewrites put into programs.
OWN = frozenset({ring.FORWARD, ring.BACKWARD})

# Collections of several primitives' names elsewhere, and why each is not a fact of the primitives.
ALLOWED = {
    ("ir/words.py", "_PARTIAL"): "operators of reductions",
    ("cost/collectives.py", "COLLECTIVES"): "collectives by their HLO names",
    ("collectives.py", "REDUCTIONS"): "operators of reductions",
    ("compilers/gpu.py", "BUCKET_LIMITS"): "collectives by their HLO names",
    ("compilers/gpu.py", "LIBRARY_OPERATIONS"): "what XLA:GPU weighs otherwise",
    ("explanation/layers.py", "_STRUCTURE"): "names that JAX puts on the stack of names",
    ("ir/collective.py", "KINDS"): "collectives by their HLO names",
    ("ir/rule.py", "OPERATORS"): "operators of reductions",
    ("compilers/gpu.py", "LACKS"): "operators of reductions",
    ("compilers/tpu/compiler.py", "LACKS"): "operators of reductions",
    ("lower/element_types.py", "_EXTREMES"): "operators of reductions",
    ("lower/constraint_plan.py", "ALIASING"): "what JAX lowers to nothing",
    ("lower/control_flow.py", "FLOWS"): "the lowering's function for each",
    ("lower/exchange.py", "BODIES"): "the lowering's function for each",
    ("lower/exchange.py", "_JOINED"): "the lowering's function for each",
    ("lower/xla_workarounds.py", "WORKAROUNDS"): "the lowering's function for each",
    ("lower/mesh.py", "_NEED_DEVICES"): "what JAX does not lower for abstract meshes",
    ("lower/nested.py", "_INSTEAD"): "the lowering's function for each",
    ("lower/opaque.py", "KERNELS"): "what only its own platform lowers",
    ("lower/shards.py", "PLACED"): "the lowering's function for each",
    ("lower/shards.py", "RESIZED"): "the lowering's function for each",
    ("microbatch/arrays.py", "COMBINED"): "operators of reductions",
    ("microbatch/elements.py", "_OF_POSITIONS"): "what positions become",
    ("microbatch/provenance.py", "_FOLDED"): "how numbers are computed",
    ("microbatch/provenance.py", "_POSITIONS"): "results that are positions",
    ("microbatch/provenance.py", "_SAME"): "results that are the operands",
    ("microbatch/rewrite.py", "BODIES"): "the rewriting's function for each",
    ("microbatch/status.py", "_EXTREMES"): "linear in what",
    ("microbatch/status.py", "_OF_ALL"): "linear in what",
    ("microbatch/status.py", "_OF_EITHER"): "linear in what",
    ("microbatch/status.py", "_OF_FIRST"): "linear in what",
    ("microbatch/status.py", "_OF_ONE"): "linear in what",
    ("probe/programs.py", "COLLECTIVES"): "collectives by their HLO names",
    ("recompute/block.py", "DRAWN_ONCE"): "random numbers that are others when they are drawn again",
    ("rewrite/padding_contents.py", "_ABSORBING"): "what one operand alone decides",
    ("rewrite/padding_contents.py", "_EXACT"): "what NumPy has as well",
    ("rewrite/padding_contents.py", "_FIXED"): "values of functions",
    ("rewrite/padding_contents.py", "_PARALLEL"): "the rewriting's function for each",
    ("rewrite/padding_contents.py", "_RULES"): "the rewriting's function for each",
    ("rewrite/padding_contents.py", "_RULES_OF_KIND"): "the rewriting's function for each",
    ("rewrite/padding_rules.py", "_COMPUTED"): "the rewriting's function for each",
    ("rewrite/padding_rules.py", "_TAKES"): "the rewriting's function for each",
    ("rewrite/padding_rules.py", "_UNCHANGED"): "the rewriting's function for each",
    ("rewrite/region.py", "BY_ROW"): "kinds, of which some are named like a primitive",
    ("rewrite/region.py", "POSITIONAL"): "what depends on positions though its kind does not",
    ("rewrite/scopes.py", "NESTED"): "what is edited as a scope of its own",
    ("rewrite/values.py", "ELEMENTWISE"): "what NumPy has as well",
    ("rewrite/values.py", "MOVES"): "the evaluation's function for each",
    ("rewrite/values.py", "REDUCTIONS"): "what NumPy has as well",
    ("rules/attention.py", "(FORWARD, BACKWARD)"): "the primitives of one kernel",
    ("rules/exact_functions.py", "EXACT"): "what NumPy has as well",
    ("rules/kernel_body.py", "_INTEGER"): "what index maps are evaluated by",
    ("rules/partitioner.py", "GATHERED"): "what XLA's partitioner does",
    ("rules/partitioner.py", "ITERATED"): "what XLA's partitioner does",
    ("rules/partitioner.py", "PASSED_WHOLE"): "what XLA's partitioner does",
    ("rules/partitioner.py", "PROPAGATED"): "what XLA's partitioner does",
    ("rules/partitioner.py", "UNKNOWN"): "what XLA's partitioner does",
    ("rules/reduction.py", "IDEMPOTENT"): "operators of reductions",
    ("rules/shardy.py", "OPERATORS"): "operators of reductions",
    ("search/tensor_parallel.py", "TAKES_APART"): "what one searcher follows the parts of",
    ("trace/simplify.py", "REARRANGING"): "what one pass makes once",
    ("verify/attribution.py", "_NOTHING"): "HLO's instructions that no kernel computes",
    ("verify/attribution.py", "_PASSED"): "HLO's instructions that only move values",
    ("verify/hlo.py", "KINDS"): "collectives by their HLO names",
    ("verify/manual.py", "KINDS"): "collectives by their HLO names",
    ("verify/shardy_passes.py", "KINDS"): "collectives by their HLO names",
}


def test_every_name_in_the_table_is_a_primitive_of_jax():
    """A name that JAX does not trace, as of an older version, would be a fact that nobody reads."""
    assert sorted(set(PRIMITIVES) - registry().known - IN_SOME_RELEASES - OWN) == []


def test_every_primitive_that_jax_lowers_is_in_the_table_or_has_a_reason_not_to_be():
    """A primitive that a new version of JAX brings is classified before anybody trusts a cost."""
    excused = {name for names in UNCLASSIFIED.values() for name in names}
    unclassified = registry().lowered - set(PRIMITIVES)
    assert sorted(unclassified - excused) == []
    assert sorted(excused - unclassified - IN_SOME_RELEASES) == []


def test_every_rule_is_of_a_primitive_of_jax():
    """A rule for a name that JAX does not trace would never be asked."""
    assert sorted(RULES - registry().known - IN_SOME_RELEASES - OWN) == []


def test_no_primitive_is_in_the_table_twice():
    """A second row would silently win over the first."""
    rows = [node for node in ast.walk(ast.parse((PACKAGE / "primitives.py").read_text())) if isinstance(node, ast.Call)]
    names = [name for row in rows if ast.unparse(row.func) == "_each" for name in str(ast.literal_eval(row.args[0])).split()]
    assert [name for name, n in Counter(names).items() if n > 1] == []
    assert set(PRIMITIVES) - set(names) == {f"reduce_{operator}" for operator in OPERATORS}


def test_facts_are_of_the_kinds_that_have_them():
    """Ranks are of linear algebra, factors of n³ of factorisations, bodies of programs, operators those of rules."""
    for name, each in PRIMITIVES.items():
        assert (each.core_rank > 0) == (each.kind == "linear_algebra"), name
        assert (each.cubic > 0) == (each.work == "factorisation"), name
        assert bool(each.bodies) == (each.kind in ("loop", "branch", "call", "inlined_call", "custom_rule")), name
        assert each.operator in ("", *OPERATORS), name
        assert not (each.view and each.anchor), name
        assert not each.view or each.work == "none", name
        assert each.kind != "product" or each.anchor, name


def test_scatters_go_by_the_names_that_jax_has_for_them():
    """JAX writes them with a hyphen: their updates are counted, and they are outside fusions."""
    assert set(of_kind("scatter")) == {name for name in registry().known if name.startswith("scatter")}
    assert {primitive(name).work for name in of_kind("scatter")} == {"none", "updates"}
    for name in of_kind("scatter"):
        assert is_scatter(name) and updates(name) and primitive(name).anchor and is_computed_once(name)


def test_an_unknown_primitive_has_no_facts():
    """A user's own primitive is none of what the queries ask for, and counts an operation for each element that it makes."""
    assert primitive("of_my_own") is UNKNOWN and UNKNOWN.work == "results"
    assert not any(asked("of_my_own") for asked in (is_matrix, is_reduction, is_scatter, is_computed_once))


def collections(file: str, source: str) -> Iterator[tuple[str, str]]:
    """The module-level variables, with their file, whose value names two or more primitives."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
            texts = {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
            if len(texts & registry().known) > 1 and ast.unparse(target) != "__all__":
                yield file, ast.unparse(target)


def test_facts_of_primitives_are_in_one_table():
    """No other module keeps a list of primitives, but for what is none of their own facts; and no excuse is left over."""
    files = {file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}
    found = {each for file, source in files.items() if file != "primitives.py" for each in collections(file, source)}
    assert sorted(found) == sorted(ALLOWED)


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('VIEWS = frozenset({"reshape", "squeeze"})', True),
        ('WORK: dict[str, float] = {"exp": 2.0, "log": 2.0}', True),
        ('ONCE = OTHERS | {*("concatenate", "pad")}', True),
        ('WORK = dict.fromkeys(("sin", "cos"), 20.0)', True),
        ('__all__ = ["load", "name"]', False),
        ('NOT_OURS = ("alpha", "exp")', False),
        ('def f(op):\n    return op in ("exp", "log")', False),
    ],
)
def test_a_list_of_primitives_is_seen(source, seen):
    """Sets, dicts, unions and tuples at the top of a module are found; what a function compares with is not."""
    assert bool(list(collections("x.py", source))) == seen
