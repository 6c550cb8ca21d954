"""Kernels of a compiled program are attributed to the operations that they compute, by the scopes that the lowering gives."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.verify.attribution import NO_OP, Clock, CompiledKernel, bytes_by_op, compiled_kernels, seconds_by_op

# ruff: noqa: E501
TEXT = """HloModule jit_step

%product (p.0: f32[8,8], p.1: f32[8,8]) -> f32[8,8] {
  %p.0 = f32[8,8]{1,0} parameter(0)
  %p.1 = f32[8,8]{1,0} parameter(1)
  %sine = f32[8,8]{1,0} sine(%p.0), metadata={op_name="jit(step)/shard_map/jvp(op=3)/sin"}
  %cosine = f32[8,8]{1,0} cosine(%sine), metadata={op_name="jit(step)/shard_map/jvp(op=3)/sin"}
  ROOT %dot = f32[8,8]{1,0} convolution(%cosine, %p.1), dim_labels=bf_io->bf, metadata={op_name="jit(step)/op=2/shard_map/jvp(ab/op=4)/dot_general"}
}

%body (carry: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %carry = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%carry), index=1
  %y = f32[8,8]{1,0} negate(%x), metadata={op_name="jit(step)/while/body/op=6/neg"}, backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%i, %y)
}

%cond (c: (s32[], f32[8,8])) -> pred[] {
  %c = (s32[], f32[8,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %k = s32[] constant(7)
  ROOT %less = pred[] compare(%n, %k), direction=LT
}

ENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0), metadata={op_name="x"}
  %b = f32[8,8]{1,0} parameter(1), metadata={op_name="w"}
  %before = f32[8,8]{0,1} copy(%b), metadata={op_name="w"}, backend_config={"estimated_cycles":"5"}
  %fused = f32[8,8]{1,0} fusion(%a, %before), kind=kOutput, calls=%product, metadata={op_name="jit(step)/shard_map/op=5/add"}, backend_config={"estimated_cycles":"100"}
  %after = f32[8,8]{0,1} copy(%fused), backend_config={"estimated_cycles":"3"}
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,8]{1,0}) tuple(%zero, %after)
  %loop = (s32[], f32[8,8]{1,0}) while(%init), condition=%cond, body=%body, metadata={op_name="jit(step)/shard_map/op=7/while"}, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_kernel_is_led_by_its_product():
    """Its other operations are known; copies without a scope are led by what makes or reads them, and loops count their trips."""
    kernels = {kernel.name: kernel for kernel in compiled_kernels(TEXT)}
    assert kernels["fused"].leader == 4 and sorted(kernels["fused"].ops) == [3, 4, 5]
    assert kernels["before"].leader == kernels["after"].leader == 4
    assert (kernels["y"].leader, kernels["y"].runs, kernels["fused"].nbytes) == (6, 7, 3 * 256)
    assert seconds_by_op(kernels.values(), Clock(1.0)) == {4: 108, 6: 70}


def test_programs_of_others_have_no_operations():
    """A user's own scope of the same name at another place is none, nor is a program without ours."""
    kernels = compiled_kernels(re.sub(r"op=(\d)", r"top=\1", TEXT))
    assert {kernel.leader for kernel in kernels} == {NO_OP}


@pytest.mark.parametrize("lowering", ["manual", "constraints"])
def test_lowered_programs_name_their_operations(lowering):
    """Every product of the graph is found in the program that XLA:CPU compiles, in loops too."""

    def step(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        def loss(x):
            return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

        return x - 0.1 * jax.grad(loss)(x)

    args = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
    found = autoshard.search(step, *args, cluster="cpu:8", mesh={"data": 8})
    text = found.apply(step, lowering=lowering).lower(*args).compile().as_text()
    products = {op.index for op in found._judged.facts.graph.walk() if op.primitive == "dot_general"}
    named = {int(op) for op in re.findall(r'op_name="[^"]*[/(]op=(\d+)\)*/dot_general"', text)}
    assert named == products and len(products) == 2


def test_bytes_at_the_peak_are_those_of_operations_and_arguments():
    """Arguments are known by their position; a name that the text lacks is of no operation."""
    made, given = bytes_by_op(TEXT, [("fused", 256.0), ("before", 256.0), ("b", 256.0), ("y", 8.0), ("unknown", 1.0)])
    assert made == {4: 512.0, 6: 8.0, NO_OP: 1.0} and given == {1: 256.0}


@pytest.mark.parametrize("product, nbytes, seconds", [(True, 10.0, 2.0), (True, 60.0, 1.0), (False, 10.0, 1.0)])
def test_products_take_what_machines_reach_of_the_peak(product, nbytes, seconds):
    """A schedule's product at the peak takes longer on a machine, unless it waits for memory; other kernels take what is scheduled."""
    kernel = CompiledKernel("k", 0, (0,), product, 1, 100, nbytes)
    assert Clock(100.0, 0.5, 100.0).seconds(kernel) == seconds and Clock(100.0).seconds(kernel) == 1.0
