"""Graphs by hand: random programs of nested loops, numbered as a trace numbers them."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir import Body, Flow, Graph, Holder, Op, Origin, Value

trees = st.recursive(st.just(()), lambda bodies: st.lists(bodies, max_size=3).map(tuple), max_leaves=12)


def program(tree) -> Graph:
    """A chain of ops, each of which reads the value before it; a node with children is a loop of three trips that carries a value."""
    ops = 0
    values = [Value((8, 4), "float32", 4.0)]

    def value() -> int:
        values.append(values[0])
        return len(values) - 1

    def chain(nodes, read, path, trips) -> tuple[tuple[Op, ...], int]:
        nonlocal ops
        made = []
        for position, children in enumerate(nodes):
            index, ops = ops, ops + 1
            place = (*path, position)
            if children:
                carry = value()
                body, last = chain(children, carry, (*place, 0), 3 * trips)
                holder = Holder(carry, (Flow(read), Flow(last, inside=True)), (result := value(),))
                bodies = (Body((carry,), (last,), body, 3),)
                made.append(Op(index, "scan", (read,), (result,), {}, Origin(), place, trips, bodies, (holder,)))
            else:
                made.append(Op(index, "tanh", (read,), (result := value(),), {}, Origin(), place, trips))
            read = result
        return tuple(made), read

    found, last = chain(tree, 0, (), 1)
    return Graph("f", tuple(values), found, (0,), ("x",), (last,), ("y",))


@given(trees)
def test_a_walk_is_the_program_in_order(tree):
    """Every op once, by number, a loop before its body's ops and after what it reads; each as often as the loops around it run it."""
    graph = program(tree)
    ops = graph.walk()
    assert [op.index for op in ops] == list(range(len(ops))) and ops == graph.walk()
    assert len({id(op) for op in ops}) == len(ops) and [op.path for op in ops] == sorted(op.path for op in ops)
    known = set(graph.arguments)
    for op in ops:
        assert known.issuperset(op.operands) and known.isdisjoint(op.results)
        assert op.trips == 3 ** (len(op.path) // 2)
        known.update(op.results, *(body.inputs for body in op.bodies))
    assert known == set(range(len(graph.values))) and known.issuperset(graph.results)


@given(trees)
def test_what_flows_inside_flows_every_trip(tree):
    """What a loop begins with is read once each time it runs, what it carries once a trip."""
    for op in program(tree).walk():
        for flow in (flow for holder in op.holders for flow in holder.sources):
            assert op.flow_trips(flow) == op.trips * (3 if flow.inside else 1)


@given(trees)
def test_every_read_is_an_edge(tree):
    """Ops, arguments and results are nodes, and from the argument a path leads to every op and to the result; no read is left out."""
    graph = program(tree)
    found = graph.to_networkx()
    assert found.number_of_nodes() == len(graph.walk()) + 2
    assert nx.descendants(found, ("argument", 0)) == set(found) - {("argument", 0)}
    reads = {(value, ("op", op.index)) for op in graph.walk() for value in op.operands} | {(graph.results[0], ("result", 0))}
    assert {(edge["value"], end) for _, end, edge in found.edges(data=True)} >= reads


def test_loop_constants_are_what_every_trip_reads_alike():
    """One value flows in, and is neither sliced nor carried; other ops than loops have none."""
    alike, sliced = Holder(1, (Flow(0),)), Holder(2, (Flow(0, shift=1),))
    carried = Holder(3, (Flow(0), Flow(3, inside=True)))
    holders = alike, sliced, carried
    values = tuple(Value((8,), "float32", 4.0) for _ in range(5))
    body = Body((1, 2, 3), (3,), (), 3)

    def graph(primitive: str) -> Graph:
        op = Op(0, primitive, (0,), (4,), {}, Origin(), (0,), 1, (body,), holders)
        return Graph("f", values, (op,), (0,), ("x",), (4,), ("y",))

    assert list(graph("scan").loop_constants()) == [alike] and list(graph("cond").loop_constants()) == []


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from((0.5, 1.0, 2.0, 4.0)))
def test_a_value_has_the_bytes_of_its_elements(shape, itemsize):
    """Rank, elements and bytes follow from the shape; a scalar is one element, what has an empty dimension none."""
    value = Value(shape, "some", itemsize)
    index = [()]
    for n in shape:
        index = [(*place, k) for place in index for k in range(n)]
    assert (value.rank, value.size, value.nbytes) == (len(shape), len(index), len(index) * itemsize)


def test_an_origin_says_where_it_is():
    """File, line and function; without a function the line, without a file that it is not known."""
    assert str(Origin("model.py", 7, "loss")) == "model.py:7 (loss)" and str(Origin("model.py", 7)) == "model.py:7"
    assert str(Origin()) == "unknown source"


def test_zeros_are_written_through_broadcasts_and_casts():
    """A literal 0, what is broadcast and cast of it; no other numbers, nothing unknown, nothing computed of zeros."""
    values = tuple(Value(shape, "float32", 4.0) for shape in ((), (), (), (4,), (4,), (4,), (4,)))
    made = (("broadcast_in_dim", 0, 3), ("convert_element_type", 3, 4), ("broadcast_in_dim", 1, 5), ("exp", 3, 6))
    ops = tuple(Op(i, name, (read,), (result,), {}, Origin(), (i,)) for i, (name, read, result) in enumerate(made))
    graph = Graph("f", values, ops, (), (), (6,), ("y",), literals=(0, 1, 2), written=(0.0, 1.0))
    assert graph.zeros == {0, 3, 4}
