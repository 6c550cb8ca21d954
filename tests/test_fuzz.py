"""Random programs: every sharding of them keeps their numbers, and sends exactly what was predicted."""

from __future__ import annotations

import random

import jax
import pytest
from fuzz import NAMES, Program, abstract_eval, random_program, shrunk
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

programs = st.randoms(use_true_random=False).map(random_program)


@settings(max_examples=2, derandomize=True, database=None, phases=[Phase.generate])
@given(programs)
def test_any_program_keeps_its_numbers_and_its_promises(program):
    """Searched by three searchers, given random specs, or assigned at random: equal results, and the predicted collectives."""
    note(str(program))
    program.check()


@pytest.mark.slow(minutes=60)
@settings(max_examples=1000, database=None, phases=[Phase.generate])
@given(programs)
def test_a_thousand_programs_keep_their_numbers_and_their_promises(program):
    """The same for programs that are new each time; ``python -m benchmarks.fuzz`` shrinks what fails, too."""
    note(str(program))
    program.check()


def test_programs_are_made_from_their_seed_alone():
    """The same seed writes the same text, another seed another."""
    first, again, other = (random_program(random.Random(seed)) for seed in ("one", "one", "two"))
    assert str(first) == str(again) != str(other)


def test_a_printed_program_is_a_test():
    """What is printed defines a test that checks the same function, arguments and specs."""
    program = random_program(random.Random("pins"))
    calls = []
    names = {**NAMES, "check": lambda fn, *args, **specs: calls.append((fn, args, specs))}
    exec(str(program), names)
    names["test_name"]()
    ((fn, args, specs),) = calls
    assert args == program.args()
    assert specs == {"pins": program.specs(program.pins), "in_specs": program.specs(program.in_specs)}
    types, same = (abstract_eval(lambda args, one=one: one(*args), args) for one in (fn, program.function()))
    assert jax.tree.structure(types) == jax.tree.structure(same) and jax.tree.leaves(types) == jax.tree.leaves(same)


def test_a_failing_program_shrinks_to_what_fails():
    """What has no part in a failure goes: other lines, results and pins; variables become arguments."""
    program = Program(
        (("a", "f32(8, 4)"), ("b", "f32(4)")),
        ("v0 = a + b", "def f(c):", "    v1 = c * 2", "    return v1", "v2 = f(v0)", "v3 = jnp.sort(v2)", "return v0, v3"),
        pins=(("a", "P('x', None)"),),
    )
    smaller = shrunk(program, lambda one: "sort" in str(one) and one.function() is not None)
    assert smaller.lines == ("v3 = jnp.sort(v2)", "return v3")
    assert smaller.arguments == (("v2", "f32(8, 4)"),)
    assert smaller.pins == ()
