"""What a program's ops are to compilers, and patterns of ops that they treat in their own way: found before it is fused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.analysis.vector_products import is_on_matrix_unit
from autoshard.ir import Graph, Op, Value, is_transfer
from autoshard.primitives import (
    commutes_with_casts,
    is_addition,
    is_anchor,
    is_control_flow,
    is_loop,
    is_reduction,
    is_scatter,
    is_view,
    of_kind,
)

# Of a product's elements, at least: then leaving out the rest, or padding it, hardly changes the product's work. The compiler makes any
# product so. evidence: products without their ends
MOST_OF = 15 / 16

Minor = tuple[tuple[int, ...], ...]
"""Groups of dimensions, of which two are innermost: an image's batch and its features, or those that a batched product multiplies by."""


def recomputes(op: Op) -> bool:
    """Whether an op is what a rematerialised region becomes: its body run again, or the barrier before that."""
    return op.primitive == "optimization_barrier" or (is_call(op) and bool(op.params.get("differentiated", False)))


def stands_alone(op: Op) -> bool:
    """Whether an op stands outside fusions.

    So do strided slices of the two innermost dimensions, which tiles are of, and pads between elements: ``slice.1`` and ``pad.1`` between
    two fusions each in single kernels compiled by libtpu 0.0.42; a slice of rows of images is fused.
    """
    # evidence: strided slices stand alone
    if op.primitive == "slice":
        return any(stride > 1 for stride in (op.params.get("strides") or ())[-2:])
    if op.primitive == "pad":
        return any(interior for *_, interior in op.params["padding_config"])
    return is_anchor(op.primitive) or is_transfer(op)


def is_call(op: Op) -> bool:
    """Whether an op's body runs in its place, its results being the body's own: compilers see through it."""
    return len(op.bodies) == 1 and not is_control_flow(op.primitive) and op.results == op.bodies[0].outputs


def added_to(graph: Graph, free: Sequence[bool]) -> dict[int, tuple[int, int]]:
    """Per op that adds what was scattered into zeros: which summand that is not, if nothing else reads this one, and the scatter's index.

    XLA:GPU scatters into that summand instead.
    """
    # evidence: scatters write in place
    ops = graph.walk()
    readers = Counter(value for op in ops for value in dict.fromkeys(op.operands))
    scattered = {op.results[0]: op.index for op in ops if op.primitive == "scatter-add" and free[op.operands[0]]}
    found = {}
    for op in ops:
        for position in (0, 1) if is_addition(op.primitive) else ():
            other, sparse = op.operands[position], op.operands[1 - position]
            if sparse in scattered and readers[other] == readers[sparse] == 1:
                found[op.index] = position, scattered[sparse]
    return found


def reordered(graph: Graph) -> set[int]:
    """What is computed of a product's result that lies in another order of dimensions than the other products' that a kernel reads with it.

    Either order of a product's free dimensions is as good, but not those of one operand among each other: scores of queries that share keys
    lie as ``[keys, (queries, groups)]``, and the gradient of their softmax as ``[(groups, queries), keys]``. XLA:GPU moves that, widened.
    """
    # evidence: reordered scores are written wide
    ops, values = graph.walk(), graph.values
    found: set[int] = set()
    lies: dict[int, tuple[frozenset[tuple[int, ...]], int, int]] = {}  # groups of dimensions, the product, and what it was widened to
    for op in ops:
        if op.primitive == "dot_general":
            (left, right), (batch, _) = op.params["dimension_numbers"]
            n, shape = values[op.operands[0]].rank - len(left), values[op.results[0]].shape
            groups = (range(len(batch), n), range(n, len(shape)))
            if len(batch) and len(right):
                lies[op.results[0]] = frozenset(tuple(dim for dim in group if shape[dim] > 1) for group in groups), op.index, -1
        elif op.primitive == "transpose" and op.operands[0] in lies:
            groups, product, wide = lies[op.operands[0]]
            place = {dim: position for position, dim in enumerate(op.params["permutation"])}
            lies[op.results[0]] = frozenset(tuple(place[dim] for dim in group) for group in groups), product, wide
        elif len(op.results) == 1 and not op.bodies and not stands_alone(op):
            (result,) = op.results
            of = sorted((lies[v] for v in op.operands if v in lies and values[v].shape == values[result].shape), key=lambda one: one[1])
            if of:
                groups, product, wide = of[0]
                found.update(other[2] for other in of[1:] if other[0] != groups and other[2] >= 0)
                lies[result] = groups, product, result if wide < 0 and op.primitive == "convert_element_type" else wide
    return found


def trims(graph: Graph) -> dict[int, int]:
    """The ops that leave out the ends of what a product makes, or pad what it reads by as little, with what is stored for it, or -1.

    XLA:TPU makes such a product without the ends at once, and reads no pad: what is padded lies in memory, rounded as the product reads it
    (logits and their gradient in a loss over shifted labels, libtpu 0.0.42).
    """
    # evidence: products without their ends
    ops, values = graph.walk(), graph.values
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for value in dict.fromkeys(op.operands):
            readers.setdefault(value, []).append(op)
    found: dict[int, int] = {}
    made: set[int] = set()  # by products, or converted since
    for op in ops:
        if op.primitive == "dot_general" or (op.primitive == "convert_element_type" and op.operands[0] in made):
            made.update(value for value in op.results if len(readers.get(value, ())) == 1)
        elif op.primitive == "slice" and op.operands[0] in made and set(op.params.get("strides") or (1,)) == {1}:
            if values[op.results[0]].size >= MOST_OF * values[op.operands[0]].size:
                found[op.index] = -1
        elif op.primitive == "pad" and values[op.operands[0]].size >= MOST_OF * values[op.results[0]].size:
            after, value = readers.get(op.results[0], []), op.results[0]
            while len(after) == 1 and after[0].primitive == "convert_element_type":
                (value,) = after[0].results
                after = readers.get(value, [])
            if after and all(reader.primitive == "dot_general" for reader in after) and not stands_alone(op):
                found[op.index] = value
    return found


def looked_up_in_two_orders(graph: Graph) -> frozenset[int]:
    """The transposes of computed arrays whose elements are looked up in more orders of dimensions than one.

    XLA:TPU stores what a gather reads, and what another reads in another order is another array to it, which the same kernel makes: logits
    of two towers whose rows and columns have their losses (libtpu 0.0.52). A product's own result is stored once.
    """
    # evidence: lookups in two orders
    ops = graph.walk()
    makers = {value: op for op in ops for value in op.results}
    computed = frozenset(of_kind("elementwise"))
    orders: dict[int, dict[tuple[int, ...], int]] = {}  # by array the orders in which it is looked up, each with its transpose
    for op in ops:
        maker = makers.get(op.operands[0]) if op.primitive == "gather" else None
        if maker is not None and maker.primitive == "transpose":
            orders.setdefault(maker.operands[0], {}).setdefault(maker.params["permutation"], maker.index)
        elif maker is not None:
            orders.setdefault(op.operands[0], {}).setdefault((), -1)
    several = (found for value, found in orders.items() if len(found) > 1 and (made := makers.get(value)) and made.primitive in computed)
    return frozenset(index for found in several for index in (*found.values(),)[1:])


def is_one_hot(op: Op, values: Sequence[Any]) -> bool:
    """Whether a scatter puts one number a row, by an index of its own: compilers compare positions instead, in registers."""
    numbers = op.params.get("dimension_numbers")
    if not is_scatter(op.primitive) or numbers is None:
        return False
    batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    rows, indexed = values[op.operands[0]].rank, values[op.operands[1]].rank - 1 > len(batch)
    return not numbers.update_window_dims and len(batch) + len(numbers.inserted_window_dims) == rows and bool(batch) and indexed


def stays_narrow(op: Op, values: Sequence[Value]) -> bool:
    """Whether what is computed of a product's result is kept no wider than that is made: its readers widen it. Of scores it is kept wide.

    So logits that are scaled, capped or biased in float32 are kept as ``bf16[8192,8192]``, convolutions before a normalisation as
    ``bf16[64,64,64,128]``, and scores of queries that share keys as ``bf16[8,4,4,1024,1024]``, but those of attention without groups,
    a batched product of operands with one free dimension each, in float32 (libtpu 0.0.42, with masks and without).
    """
    # evidence: wide scores
    if op.primitive != "dot_general":
        return True
    contracted, batch = op.params["dimension_numbers"]
    free = [values[v].rank - len(c) - len(b) for v, c, b in zip(op.operands, contracted, batch, strict=True)]
    return not batch[0] or max(free) > 1


def sliced(graph: Graph, again: bool) -> tuple[int, ...]:
    """The values that are kept since kernels would compute them in several places: of which several slices are read, or one with strides.

    XLA:TPU computes none of them twice: of ``exp(x)`` one half is computed where it is read, two halves are read from all of it, be it in
    one kernel. It slices what is spread or put together instead (27 programs, libtpu 0.0.42). XLA:GPU computes them in two places, but not
    what they are made of in four (an associative scan, jaxlib 0.10.2).

    Args:
        again: whether only those count that are computed from slices of what is itself computed.
    """
    # evidence: sliced values are stored
    slices: Counter[int] = Counter()
    computed, nested = set[int](), set[int]()
    read = {value for op in graph.walk() for value in op.operands} | set(graph.results)
    for op in graph.walk():
        if op.primitive in ("slice", "dynamic_slice"):
            slices[op.operands[0]] += 2 if any(stride > 1 for stride in op.params.get("strides") or ()) else 1
        elif op.primitive == "split":
            slices[op.operands[0]] += sum(value in read for value in op.results)
        elif op.bodies or stands_alone(op) or is_reduction(op.primitive) or op.primitive in ("broadcast_in_dim", "concatenate", "pad"):
            continue
        else:
            computed.update(op.results if not is_view(op.primitive) or op.operands[0] in computed else ())
            nested.update(op.results if not nested.isdisjoint(op.operands) else ())
            continue
        nested.update(op.results if op.operands[0] in computed or op.operands[0] in nested else ())
    return tuple(value for value, n in slices.items() if n > 1 and value in (nested & computed if again else computed))


def minor(graph: Graph) -> tuple[Minor | None, ...]:
    """Per value the dimensions that tiles have, where convolutions or batched products want some.

    What convolutions read and make, and its like, has batch and features innermost. A reshape that splits features, as group norms do, is a
    view of that: XLA makes the sums of groups of those of features (libtpu 0.0.42, 1 to 64 images of 64 to 512 features).
    What batched products read and make, and its like, has two of the other dimensions innermost, however short: ``bf16[512,2,2,49,49]`` of
    attention to 49 positions lies in tiles of 56 x 128 (six kinds of products, libtpu 0.0.42). Of one row or column they are none there.
    So are transforms whose frequencies are multiplied one by one: ``f32[8,64,256,129]{1,0,3,2}`` of 64 features for each part of complex
    numbers (a Fourier operator, libtpu 0.0.52).
    """
    found: list[Minor | None] = [None] * len(graph.values)
    shape = [value.shape for value in graph.values]
    for op in graph.walk():
        if op.primitive == "conv_general_dilated":
            numbers = op.params["dimension_numbers"]
            tensors = (*op.operands[:2], op.results[0])
            for value, spec in zip(tensors, (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), strict=True):
                found[value] = (spec[0],), (spec[1],)
    if any(found):
        _spread(graph.walk(), shape, found)
        for op in graph.walk():
            if op.primitive == "reshape":
                for value, other in ((op.operands[0], op.results[0]), (op.results[0], op.operands[0])):
                    if found[value] == ((0,), (len(shape[value]) - 1,)):
                        found[other] = found[other] or _split(shape[value], shape[other])
        _spread(graph.walk(), shape, found)
    products: list[Minor | None] = [None] * len(graph.values)
    for op in graph.walk():
        for value, dims in _multiplied(op, shape):
            products[value] = products[value] or dims
    if any(products):
        _spread(graph.walk(), shape, products)
        _turn(graph.walk(), products)
    return tuple(image or product for image, product in zip(found, products, strict=True))


def _multiplied(op: Op, shape: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, Minor]]:
    """The operands and the result of a batched product of matrices, each with the largest of its dimensions on either side of it."""
    if op.primitive != "dot_general":
        return
    contracted, batch = op.params["dimension_numbers"]
    free = [[d for d in range(len(shape[v])) if d not in c and d not in b] for v, c, b in zip(op.operands, contracted, batch, strict=True)]
    sides = [(op.operands[0], free[0]), (op.operands[1], free[1]), (op.operands[0], contracted[0])]
    if not batch[0] or any(math.prod(shape[value][d] for d in dims) == 1 for value, dims in sides):
        return
    for value, *groups in zip(op.operands, free, contracted, strict=True):
        yield value, tuple((max(dims, key=shape[value].__getitem__),) for dims in groups)
    rows, columns = ([len(batch[0]) + offset + d for d in range(len(dims))] for offset, dims in ((0, free[0]), (len(free[0]), free[1])))
    made = shape[op.results[0]]
    yield op.results[0], ((max(rows, key=made.__getitem__),), (max(columns, key=made.__getitem__),))


def _split(image: tuple[int, ...], other: tuple[int, ...]) -> Minor | None:
    """The batch and the features of what an image is reshaped to, if it still has them, in groups.

    >>> _split((8, 32, 32, 64), (8, 1024, 4, 16)), _split((8, 32, 32, 64), (8, 32, 2048))
    (((0,), (2, 3)), None)
    """
    first = next((dim for dim in range(1, len(other)) if math.prod(other[dim:]) == image[-1]), None)
    return ((0,), tuple(range(first, len(other)))) if first is not None and other[0] == image[0] else None


def _spread(ops: Sequence[Op], shape: Sequence[tuple[int, ...]], found: list[Minor | None]) -> None:
    for some in (ops, reversed(ops)):
        for op in some:
            if op.bodies or not op.results or op.primitive in ("dot_general", "conv_general_dilated", "transpose", "reshape"):
                continue
            tensors = [value for value in (*op.operands, *op.results) if len(shape[value]) == len(shape[op.results[0]])]
            pair = next((found[value] for value in tensors if found[value]), None)
            for value in tensors:
                found[value] = found[value] or pair


def _turn(ops: Sequence[Op], found: list[Minor | None]) -> None:
    """Gives Fourier transforms what their transposes have."""
    # evidence: multiplied frequencies
    spectra = {value for op in ops if op.primitive == "fft" for value in op.results}
    turned: list[Op] = []
    for op in ops:
        if op.primitive == "transpose" and op.operands[0] in spectra:
            spectra.update(op.results)
            turned.append(op)
    for op in reversed(turned):
        if dims := found[op.results[0]]:
            found[op.operands[0]] = tuple(tuple(op.params["permutation"][dim] for dim in group) for group in dims)


def sliced_alone(graph: Graph) -> frozenset[int]:
    """The arrays of three dimensions or more whose slices only loops without products read or stack."""
    with_products, without = set[int](), set[int]()
    for op in graph.walk():
        if not is_loop(op.primitive):
            continue
        found = with_products if any(is_on_matrix_unit(graph, inner) for inner in op.walk()) else without
        for holder in op.holders:
            for flow in holder.sources:
                if flow.shift:
                    found.update((flow.value,) if flow.shift > 0 else (holder.value, *holder.views))
    return frozenset(value for value in without - with_products if graph.values[value].rank > 2)


def stacked(graph: Graph) -> dict[int, int]:
    """The stacks that loops with products of matrices make, each with one of its slices.

    A loop writes each slice as its products want it, and the steps are outermost: ``f32[128,4,16,16,32]{4,2,3,1,0:T(8,128)}`` of 128 steps
    of a recurrent convolution takes four times its size (libtpu 0.0.52).
    """
    # evidence: stacks of loops with products
    loops = (op for op in graph.walk() if is_loop(op.primitive) and any(is_on_matrix_unit(graph, inner) for inner in op.walk()))
    return {holder.value: flow.value for op in loops for holder in op.holders for flow in holder.sources if flow.shift < 0}


def are_together(readers: Sequence[Op]) -> bool:
    """Whether all readers of a product's result are reductions of one kernel, its own.

    Sums, products and extrema are, along whichever dimensions; the place of an extremum only with the extremum itself.
    """
    # evidence: reductions of one product
    places = [one for one in readers if one.primitive in ("argmax", "argmin")]
    if not readers or not all(is_reduction(one.primitive) for one in readers):
        return False
    if not places or len(readers) == 1:
        return True
    first = places[0]
    alike = {first.primitive, f"reduce_{first.primitive.removeprefix('arg')}"}
    return all(one.primitive in alike and one.params["axes"] == first.params["axes"] for one in readers)


def row_updates(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Per scatter that adds to zeros the arguments that its sum updates elementwise, where it shares an array with the update.

    Equal constants are one array: the zeros that are added to are also those that the update compares with, or selects. And a sum that is
    only added to another value is scattered into that value instead.
    """
    zeros, arguments, found = graph.zeros, frozenset(graph.arguments), dict[int, tuple[int, ...]]()
    near = _elementwise_neighbours(graph)
    for op in graph.walk():
        made = op.results[0] if op.results else None
        if op.primitive != "scatter-add" or op.operands[0] not in zeros or made not in near:
            continue
        reached, update = _update_of(made, near, graph.values, zeros)
        readers = [other for other in update if made in other.operands]
        is_added = len(readers) == 1 and is_addition(readers[0].primitive)
        if is_added or any(_compares(other, graph.values) and not zeros.isdisjoint(other.operands) for other in update):
            found[op.index] = tuple(sorted(reached & arguments))
    return found


def _elementwise_neighbours(graph: Graph) -> dict[int, list[Op]]:
    """Per value the elementwise ops that read or make it in the shape of their result."""
    kind, shapes = frozenset(of_kind("elementwise")), [value.shape for value in graph.values]
    near: dict[int, list[Op]] = {}
    for op in graph.walk():
        if op.primitive in kind and (shape := shapes[op.results[0]]):
            for value in dict.fromkeys((*op.operands, *op.results)):
                if shapes[value] == shape:
                    near.setdefault(value, []).append(op)
    return near


def _update_of(
    value: int, near: Mapping[int, Sequence[Op]], values: Sequence[Value], zeros: frozenset[int]
) -> tuple[set[int], tuple[Op, ...]]:
    """The values of its shape that elementwise ops connect with a value, not through zeros, and these ops."""
    shape, reached, queue, update = values[value].shape, {value}, [value], dict[int, Op]()
    while queue:
        for op in near[queue.pop()]:
            update[op.index] = op
            new = {other for other in (*op.operands, *op.results) if values[other].shape == shape} - reached - zeros
            reached.update(new)
            queue += new
    return reached, tuple(update.values())


def _compares(op: Op, values: Sequence[Value]) -> bool:
    """Whether an op compares or selects: what adds 0 is simplified away."""
    return commutes_with_casts(op.primitive) or values[op.results[0]].dtype == "bool"
