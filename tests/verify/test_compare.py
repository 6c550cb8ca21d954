from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir import Collective
from autoshard.verify import Row, compare

collectives = st.lists(
    st.builds(
        Collective,
        st.sampled_from(["all_gather", "all_reduce", "reduce_scatter"]),
        st.sampled_from([("x",), ("y",), ("x", "y")]),
        st.sampled_from([4.0, 64.0]),
        st.integers(1, 3),
    ),
    max_size=8,
)


@given(collectives)
def test_a_prediction_agrees_with_itself(predicted):
    """Equal sides agree in every row, in any order."""
    assert all(row.agrees and row.predicted_count == row.actual_count for row in compare(predicted, predicted[::-1]))


@given(collectives, collectives)
def test_nothing_gets_lost(predicted, actual):
    """Rows sum up to all bytes and executions of either side."""
    rows = compare(predicted, actual)
    assert sum(row.predicted_bytes for row in rows) == sum(c.bytes * c.count for c in predicted)
    assert sum(row.actual_bytes for row in rows) == sum(c.bytes * c.count for c in actual)
    assert sum(row.actual_count for row in rows) == sum(c.count for c in actual)


def test_an_all_reduce_counts_as_the_reduce_scatter_that_was_planned():
    """XLA:CPU keeps an all_reduce and a slice where the plan has a reduce_scatter; other sizes stay apart."""
    planned = [Collective("reduce_scatter", ("x",), 64.0)]
    assert compare(planned, [Collective("all_reduce", ("x",), 64.0)]) == (Row("reduce_scatter", ("x",), 1, 1, 64.0, 64.0),)
    assert not any(row.agrees for row in compare(planned, [Collective("all_reduce", ("x",), 32.0)]))
    assert not any(row.agrees for row in compare(planned, [Collective("all_reduce", ("y",), 64.0)]))
