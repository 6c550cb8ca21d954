"""Scans are read and rewritten in the form of every release of JAX."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from autoshard.ir.scan import num_carry, num_consts
from autoshard.trace import scan_params


def _scan(consts, carry, slices):
    def trip(carry, slices):
        total = sum(consts) * sum(slices, 1.0)
        return [each * total for each in carry], [total, total + 1.0, total + 2.0]

    return jax.lax.scan(trip, carry, slices, 4)


def _equation(n_consts, n_carry, n_slices):
    (eqn,) = (
        eqn
        for eqn in jax.make_jaxpr(_scan)([1.0] * n_consts, [1.0] * n_carry, [jnp.ones(4)] * n_slices).eqns
        if eqn.primitive.name == "scan"
    )
    return eqn


@pytest.mark.parametrize("written", [{"num_consts": 2, "num_carry": 3}, {"ft_in": SimpleNamespace(unpack=lambda: ("cc", "xyz", "s"))}])
def test_constants_and_carries_are_counted(written):
    """As JAX writes them before 0.11, and as trees of operands from then on."""
    assert (num_consts(written), num_carry(written)) == (2, 3)


def test_scans_get_other_bodies():
    """The parameters of a scan with the body of another one are those of the other."""
    one, other = _equation(1, 2, 0), _equation(3, 1, 2)
    made = scan_params(one.params, other.params["jaxpr"], num_consts(other.params), num_carry(other.params))
    assert (num_consts(made), num_carry(made)) == (3, 1)
    results = other.primitive.bind(*[jnp.ones(())] * 4, *[jnp.ones(4)] * 2, **made)
    assert [x.shape for x in results] == [(), (4,), (4,), (4,)] and float(results[0]) == 9.0**4
