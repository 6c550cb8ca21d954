"""Rows of the examples that are sorted by a key of each, such as tokens by their expert, in a loop over microbatches.

A microbatch sorts its own rows. What is computed of each row, and of the group that its key names, is then the same as if all were sorted:
it comes back to the order of the examples through the same permutation, or is summed up over rows. So are the counts of the keys, of
which each microbatch has those of its own rows, and with them the products of groups.

The indices that a sort makes are positions, and those of a microbatch are others than those of all examples. They may only be looked up
with, sorted, compared with each other, and divided by the rows of an example. All else of them is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.ir import Op, Rule, Value
from autoshard.microbatch.elements import EXAMPLES, Content, Coordinates, Elements, Positions, elements_of
from autoshard.microbatch.elements import Made as Array
from autoshard.microbatch.positions import Positions as Counted
from autoshard.microbatch.provenance import Provenance
from autoshard.microbatch.searching import search_of
from autoshard.microbatch.status import ZERO, Coupled, Made, Move, Status, partial, slice_along, split_along
from autoshard.primitives import is_scatter

APART = "Sort each example's own rows by a key of each, and bring the results back by the same order"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a status.

    Attributes:
        order: the index of the sort by which they are in order, or `EXAMPLES`.
        content: what their elements are.
        stacked: how many leading dimensions are of trips of loops, each of which has an order of its own.
    """

    order: int
    content: Content = Elements.OWN
    stacked: int = 0


def rows_along(dim: int, inner: int, order: int, content: Content) -> Status:
    """The status of rows; a slice where they are those of the examples, in their order."""
    if order == EXAMPLES and content is Elements.OWN:
        return slice_along(dim, inner)
    return Status("rows", dim, inner, rows=Rows(order, content))


def rows_of(status: Status) -> Rows:
    """The rows of what is split."""
    return status.rows if isinstance(status.rows, Rows) else Rows(EXAMPLES)


def through_trips(status: Status, steps: int) -> Status:
    """The status of a stack of what trips make, for 1 step, or of a slice of a stack, for -1."""
    if not status.is_split:
        return status
    if status.kind == "slice":
        return slice_along(status.dim + steps, status.inner)
    rows = rows_of(status)
    return replace(status, dim=status.dim + steps, rows=replace(rows, stacked=rows.stacked + steps))


def concerns(op: Op, reads: Sequence[Status]) -> bool:
    """Whether an op without bodies sorts examples, or reads rows."""
    return any(status.kind == "rows" for status in reads) or (
        op.primitive == "sort" and any(status == slice_along(op.params["dimension"], status.inner) for status in reads)
    )


def moved_search(op: Op, reads: Sequence[Status], n: int, known: Provenance) -> Move | None:
    """How a search in sorted keys of rows carries on: each microbatch has the counts of its own; None for other ops."""
    if n == 1 or not any(status.kind == "rows" for status in reads) or (found := search_of(op, known.graph)) is None:
        return None
    rows = rows_of(reads[0])
    sort = next((each for each in known.graph.walk() if each.index == rows.order), None)
    if sort is None or known.keys(found.keys) != known.keys(sort.operands[0]) or rows.stacked or not reads[1].is_whole:
        return None
    return Move(tuple(reads), (partial("sum"),) * len(op.results), search=found.side)


def moved_rows(op: Op, rule: Rule | None, reads: Sequence[Status], n: int, values: Sequence[Value], known: Provenance) -> Move:
    """How an op of rows carries the statuses of its operands on.

    Raises:
        Coupled: what it makes of a microbatch's rows is not what it makes of them among all.
    """
    moving = _Moving(op, rule, tuple(reads), n, tuple(values[v] for v in op.operands), tuple(values[v] for v in op.results), known)
    if any(rows_of(status).stacked for status in reads):
        raise moving.refused("reads rows that loops have stacked, sorted anew in each trip")
    special = {"gather": moving.gather, "ragged_dot_general": moving.grouped, "sort": moving.sort}.get(op.primitive)
    if is_scatter(op.primitive):
        special = moving.scatter
    found = special() if special is not None else None
    return moving.each_row() if found is None else found


@dataclass(frozen=True, slots=True, eq=False)
class _Moving:
    """One op, and what it reads."""

    op: Op
    rule: Rule | None
    reads: tuple[Status, ...]
    n: int
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    known: Provenance

    def refused(self, what: str) -> Coupled:
        """An error, with the sort whose rows are read."""
        order = next((rows_of(status).order for status in self.reads if rows_of(status).order != EXAMPLES), EXAMPLES)
        sorts = (op for op in self.known.graph.walk() if op.index == order)
        where = "".join(f", of the sort at {op.origin}" for op in sorts)
        return Coupled(self.op, f"{what}{where}", APART)

    # -- sorts, lookups and the way back ------------------------------------------------------------------------------------

    def sort(self) -> Move | None:
        """Rows by a key of each, or in the order of positions."""
        dim = self.op.params["dimension"]
        split, size = [status for status in self.reads if status.is_split], self.operands[0].shape[dim]
        if any(status.dim != dim for status in split) or self.operands[0].size != size:
            return None
        first, order = split[0], rows_of(split[0]).order
        if any((status.inner, rows_of(status).order) != (first.inner, order) for status in split):
            raise self.refused("sorts rows in one order together with those in another")
        content, made = self._beside(first, [dim] * len(self.reads), size)
        if not isinstance(content[0], Positions):
            if content[0] is not Elements.OWN:
                raise self.refused("sorts by what is computed of positions")
            order = self.op.index
        elif content[0].distinct and (content[0].size, content[0].inner) == (size, first.inner):
            order = content[0].order
        else:
            raise self.refused("sorts by some positions of rows")
        if any(each not in (Elements.OWN, Elements.FALSE) and not isinstance(each, Positions) for each in content):
            raise self.refused("sorts what is computed of positions")
        return Move(self.reads, tuple(rows_along(dim, first.inner, order, each) for each in content), made=made)

    def gather(self) -> Move | None:
        """Rows at positions; None where no rows are looked up."""
        table, indices = self.reads
        numbers = self.op.params["dimension_numbers"]
        if not table.is_split or table.dim not in numbers.start_index_map:
            return None
        made: tuple[Made | None, ...] = ()
        if indices.is_whole and (own := self._own_indices(table, len(numbers.start_index_map))) is not None:
            indices, made = own[0], (None, own[1])
        at = self._looked_up(table, self.operands[0], indices, numbers.start_index_map, "looks up")
        if self.op.params["slice_sizes"][table.dim] != 1 or any(
            size != n for d, (size, n) in enumerate(zip(self.op.params["slice_sizes"], self.operands[0].shape, strict=True)) if d not in at
        ):
            raise self.refused("looks up more than a row at once")
        batch = [d for d in range(self.results[0].rank) if d not in numbers.offset_dims]
        content = rows_of(table).content
        is_whole = self._target(indices, at)[1].distinct and self.operands[0].size == self.results[0].size
        if is_whole and self.operands[0].size == self.operands[0].shape[table.dim]:
            self.known.reordered[self.op.results[0]] = self.op.operands[0]
        if isinstance(content, Positions) and not is_whole:
            content = replace(content, distinct=False)
        results = (rows_along(batch[indices.dim], indices.inner, rows_of(indices).order, content),)
        return Move(self.reads, results, made=made)

    def _own_indices(self, rows: Status, coordinates: int) -> tuple[Status, Made] | None:
        """The status of whole indices that are the positions of rows themselves, and what a microbatch makes of them; None for others."""
        positions, shape = self.known.positions(self.op.operands[1]), self.operands[1].shape
        if positions is None or positions.offset or positions.each > 1 or not rows.is_split or coordinates != 1:
            return None
        content = Positions(rows_of(rows).order, shape[positions.dim], rows.inner)
        local = Made(self._local(shape, positions.dim), 0, positions.dim)
        return rows_along(positions.dim, rows.inner, rows_of(rows).order, content), local

    def scatter(self) -> Move | None:
        """Rows written to positions; None where they are written to what is no rows."""
        into, indices, updates = self.reads
        number, numbers = self.known.number(self.op.operands[0]), self.op.params["dimension_numbers"]
        if numbers.operand_batching_dims or not set(numbers.scatter_dims_to_operand_dims) <= set(numbers.inserted_window_dims):
            return None
        if indices.is_whole:
            if (own := self._own_indices(updates, len(numbers.scatter_dims_to_operand_dims))) is None:
                return None
            indices, beside = own[0], (None, own[1], None)
        elif isinstance(rows_of(indices).content, Positions | Coordinates):
            beside = None, None, None
        else:
            return None
        target = self._target(indices, numbers.scatter_dims_to_operand_dims)
        dim = numbers.scatter_dims_to_operand_dims[target[0]]
        to = target[1]
        if into.is_whole:
            if number is None:
                raise self.refused("writes rows of the examples into an array that is of none of them")
            into = rows_along(dim, to.inner, to.order, Elements.OWN)
            beside = Made(self._local(self.operands[0].shape, dim), number), *beside[1:]
        if (into.dim, into.inner, rows_of(into).order) != (dim, to.inner, to.order) or self.operands[0].shape[dim] != to.size or to.offset:
            raise self.refused("writes rows to positions of others")
        batch = [d for d in range(self.operands[2].rank) if d not in numbers.update_window_dims]
        written, beside = self._updates(indices, updates, batch[indices.dim], beside)
        if self.op.primitive == "scatter" and not to.distinct and self.known.number(self.op.operands[2]) is None:
            raise self.refused("writes several rows to one place, of which any may remain")
        content = self._written(rows_of(into).content, written, number, to)
        return Move(self.reads, (rows_along(dim, to.inner, to.order, content),), made=beside)

    def _updates(self, indices: Status, updates: Status, dim: int, beside: tuple) -> tuple[Content, tuple]:
        """What is written, and what a microbatch makes of whole operands."""
        if updates.is_split:
            if (updates.dim, updates.inner, rows_of(updates).order) != (dim, indices.inner, rows_of(indices).order):
                raise self.refused("writes rows in another order than that of their positions")
            return rows_of(updates).content, beside
        shape, number = self._local(self.operands[2].shape, dim), self.known.number(self.op.operands[2])
        if number is not None:
            return Elements.OWN, (*beside[:2], Made(shape, number))
        found = self.known.positions(self.op.operands[2])
        own = None if found is None or found.dim != dim else self._own(indices, self.operands[2].shape[dim], found)
        if found is None or own is None:
            raise self.refused("writes what is of no example to positions of rows")
        return own, (*beside[:2], Made(shape, found.offset, dim, found.each))

    def _written(self, before: Content, written: Content, number: float | None, to: Positions) -> Content:
        """The content of an array into which rows are written."""
        if before is Elements.OWN and written is Elements.OWN:
            return Elements.OWN
        if isinstance(written, Positions) and self.op.primitive == "scatter" and number == 0:
            everywhere = to.distinct and written.size == to.size
            return written if written.offset > 0 or everywhere else Elements.DERIVED
        return Elements.DERIVED

    def _target(self, indices: Status, dims: Sequence[int]) -> tuple[int, Positions]:
        """The coordinate of indices that is positions of rows, and which."""
        content = rows_of(indices).content
        each = content.each if isinstance(content, Coordinates) else (content,)
        found = [(k, one) for k, one in enumerate(each) if isinstance(one, Positions)]
        if len(found) != 1 or len(each) != len(dims) or any(one is not Elements.OWN for one in each if not isinstance(one, Positions)):
            raise self.refused("looks rows up by what is computed of positions")
        return found[0]

    def _looked_up(self, table: Status, value: Value, indices: Status, dims: Sequence[int], what: str) -> Sequence[int]:
        """The dimensions of the table that are indexed, where positions are those of its rows."""
        if not indices.is_split:
            raise self.refused(f"{what} examples at positions that are of none")
        k, to = self._target(indices, dims)
        if (dims[k], to.order, to.size, to.inner, to.offset) != (table.dim, rows_of(table).order, value.shape[table.dim], table.inner, 0):
            raise self.refused(f"{what} rows at positions of others")
        return dims

    # -- products of groups -------------------------------------------------------------------------------------------------

    def grouped(self) -> Move | None:
        """Products of rows by their groups, which are the keys by which the rows are sorted."""
        numbers = self.op.params["ragged_dot_dimension_numbers"]
        left, right, sizes = self.reads
        (ragged,) = numbers.lhs_ragged_dimensions
        if left.dim != ragged or left.kind != "rows":
            return None
        sort = next((op for op in self.known.graph.walk() if op.index == rows_of(left).order), None)
        counted = self.known.counted(self.op.operands[2])
        if sort is None or sizes.is_whole or self.operands[2].rank != 1 or counted is None or counted != self.known.keys(sort.operands[0]):
            raise self.refused("has groups whose sizes are not seen to be the counts of the keys by which its rows are sorted")
        found = replace(self, rule=self._of_rows(ragged), reads=(left, right, ZERO)).each_row()
        return replace(found, reads=self.reads)

    def _of_rows(self, ragged: int) -> Rule | None:
        """The rule of a grouped product of rows with groups of their own: row by row, or summed up over rows."""
        rule = self.rule
        if rule is None or len(rule.operands[0][ragged]) != 1:
            return None
        ((factor,), made) = rule.operands[0][ragged], rule.results[0]
        passes = any(factor in factors for factors in made)
        kind = replace(rule.factors[factor], kind="pass_through" if passes else "reduction", operator=None if passes else "sum")
        return replace(rule, factors=tuple(kind if k == factor else each for k, each in enumerate(rule.factors)))

    # -- row by row ---------------------------------------------------------------------------------------------------------

    def each_row(self) -> Move:
        """An op of which each row of the results is of the same row of the operands, or that sums rows up."""
        if self.rule is None:
            raise self.refused("has no sharding rule, and reads rows")
        split = {k: status for k, status in enumerate(self.reads) if status.is_split}
        orders = {rows_of(status).order for status in split.values()}
        if len(orders) > 1:
            raise self.refused("pairs rows in one order with those in another")
        (order,) = orders
        plain = tuple(slice_along(status.dim, status.inner) if status.is_split else status for status in self.reads)
        move = split_along(self.op, self.rule, plain, self.n)
        dims = [next((d for d, factors in enumerate(self.rule.operands[k]) if move.factor in factors), -1) for k in range(len(self.reads))]
        first = next(iter(split.values()))
        size = self.operands[next(iter(split))].shape[first.dim]
        content, made = self._beside(first, dims, size)
        results = elements_of(Array(self.op, self.operands, self.results, self.known), content)
        if results is None:
            raise self.refused("computes with positions of rows")
        makes = []
        for status in move.makes:
            if status.kind == "partial":
                if any(each is not Elements.OWN for each in content):
                    raise self.refused("adds up positions of rows")
                makes.append(status)
            else:
                makes.append(rows_along(status.dim, status.inner, order, results))
        return replace(move, reads=self.reads, makes=tuple(makes), made=made)

    def _beside(self, rows: Status, dims: Sequence[int], size: int) -> tuple[list[Content], tuple[Made | None, ...]]:
        """What the elements of each operand are, and what a microbatch makes of those that are whole but have the rows' dimension.

        Args:
            dims: per operand that dimension, -1: none.
        """
        content: list[Content] = []
        made: list[Made | None] = []
        for k, (status, dim, value) in enumerate(zip(self.reads, dims, self.operands, strict=True)):
            number = None if status.is_split else self.known.number(self.op.operands[k])
            found = None if status.is_split or number is not None else self.known.positions(self.op.operands[k])
            if status.is_split or dim < 0 or (number is None and status == ZERO):
                content.append(rows_of(status).content if status.is_split else Elements.OWN)
                made.append(None)
            elif number is not None:
                content.append(Elements.OWN)
                made.append(Made(self._local(value.shape, dim), number))
            elif found is not None and found.dim == dim and value.shape[dim] == size and (own := self._own(rows, size, found)) is not None:
                content.append(own)
                made.append(Made(self._local(value.shape, dim), found.offset, dim, found.each))
            elif rows_of(rows).order == EXAMPLES and self.op.primitive != "sort":  # a part of it, as beside any examples
                content.append(Elements.OWN)
                made.append(None)
            else:
                raise self.refused("pairs sorted rows with what is of none of them, by position")
        return content, tuple(made)

    def _own(self, rows: Status, size: int, found: Counted) -> Positions | None:
        """The positions of rows themselves; of the examples' also those of examples, or of several rows of one."""
        order = rows_of(rows).order
        if found.offset < 0 or rows.inner % found.each or (found.each > 1 and order != EXAMPLES):
            return None
        return Positions(order, size // found.each, rows.inner // found.each, found.offset, found.each == 1)

    def _local(self, shape: Sequence[int], dim: int) -> tuple[int, ...]:
        return tuple(size // self.n if d == dim else size for d, size in enumerate(shape))
