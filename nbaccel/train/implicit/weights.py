"""Weights: by how much each rank's gradient of each term counts, so that the sum is that of the whole batch. Pure.

A term of the loss is a sum over samples times a coefficient: 1 / n for a mean of n elements. A rank has computed it for
its samples, with the coefficient that it has there. What the whole batch would have given is the sum over ranks of
each rank's gradient times (coefficient of the whole batch / coefficient here).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from nbaccel.train.implicit.header import Header

__all__ = ["References", "differ", "factors"]

_NEAR = 1e-6
_FEW = 4
"""Samples of a part, up to which their number is often a constant of the program's, too: `0.5 * x.sum()`."""


class References:
    """By what each term was divided when its batch was whole in all ranks, and of how many samples and numbers."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[float, float, float]] = {}
        self._additive: set[Hashable] = set()
        self._guessed: dict[Hashable, tuple[float, float]] = {}  # additive as it seemed, without a whole batch

    def note(self, term: Hashable, constant: float, rows: float, elements: float = 0) -> None:
        self._found[term] = constant, rows, elements

    def cannot_tell(self, term: Hashable, constants: Sequence[float], rows: Sequence[float], whole: float) -> bool:
        """Whether a sum may have been divided by the number of samples or by a constant of the program's.

        Where ranks have equally few samples, or where a number that looked like the one stays as rows change.
        """
        if term in self._guessed:
            constant, count = self._guessed[term]
            return rows[0] != count and constants[0] == constant
        are_alike = len({*map(abs, constants), *rows}) == 1 and rows[0] <= _FEW and whole > rows[0]
        return are_alike and term not in self._found and term not in self._additive

    def is_additive(
        self,
        term: Hashable,
        constants: Sequence[float],
        rows: Sequence[float],
        whole: float,
        elements: Sequence[float] = (0,),
    ) -> bool:
        """Whether what ranks divide a sum by adds up to what that of the whole batch is divided by, as ``len(x)`` does.

        Else it is a constant of the program's. Told by evidence: it differs between ranks; it has shrunk as the batch
        has; it goes with the numbers that are added up (`elements`; 0 unknown); it is a whole number other than before,
        as the count of a mask is, and not a factor that is annealed.
        """
        if term in self._additive:
            return True
        here, known = constants[0], self._found.get(term)
        if differ(constants):
            is_it = True
        elif known is None:
            is_it = bool(rows[0]) and rows[0] != whole and not here % rows[0] and bool(here % (whole or 1))
            is_it = is_it and not differ([each / of for each, of in zip(constants, rows, strict=True)])
            is_it = is_it and not elements[0] % here
            if is_it:
                self._guessed[term] = here, rows[0]
            elif max(rows) > 1:
                self._found[term] = here, rows[0], elements[0]
        elif math.isclose(here, known[0], rel_tol=_NEAR):
            # As with the whole batch, by chance, where samples of a part are longer: only a mean by hand is known then.
            is_it = known[2] == elements[0] == here and rows[0] != known[1]
        elif known[2] and elements[0] and math.isclose(here * known[2], known[0] * elements[0], rel_tol=_NEAR):
            is_it = True
        else:
            has_shrunk = bool(known[1]) and math.isclose(here, known[0] * rows[0] / known[1], rel_tol=_NEAR)
            if not has_shrunk:
                return here == round(here)
            is_it = True
        if is_it:
            self._additive.add(term)
        return is_it


def differ(numbers: Sequence[float]) -> bool:
    """Whether they are not all the same, but for rounding."""
    return any(not math.isclose(each, numbers[0], rel_tol=_NEAR) for each in numbers)


def factors(
    header: Header, givers: Sequence[int], of_parameters: Sequence[bool], references: References
) -> list[list[float]] | None:
    """For each rank, by what each of its terms' gradients counts; None where that cannot be told.

    givers: ranks whose gradients count; those of others do not.
    of_parameters: by term, whether no batch is in it.
    """
    says, first = header.says, header.says[givers[0]]
    size, count = len(says), int(first.terms)
    even = [1.0 / len(givers) if rank in givers else 0.0 for rank in range(size)]
    is_part = any(says[rank].part for rank in givers)
    is_alike = header.all_equal("shape", givers) and header.all_equal("terms", givers)
    if not is_part:
        values = [header.values[rank][:1] for rank in givers]
        if values[0] and all(each == values[0] for each in values):  # the same work: one rank's is all of it, exactly
            even = [float(rank == givers[0]) for rank in range(size)]
        for term in range(count if is_alike else 0):
            elements = _elements(header.counts[givers[0]][term])
            references.note((first.shape, term), header.constants[givers[0]][term], first.whole or first.rows, elements)
        return [[each] * max(1, int(say.terms)) for each, say in zip(even, says, strict=True)]
    if not is_alike:
        return None
    if not count:
        rows = [says[rank].rows if rank in givers else 0.0 for rank in range(size)]
        if not sum(rows) or any(each < 0 for rank in givers for each in header.counts[rank]):
            return None
        return [[each / sum(rows)] * max(1, int(say.terms)) for each, say in zip(rows, says, strict=True)]
    columns = []
    for term in range(count):
        if of_parameters[term]:
            columns.append(even)
            continue
        counts = [header.counts[rank][term] for rank in givers]
        constants = [header.constants[rank][term] for rank in givers]
        rows = [says[rank].rows for rank in givers]
        parts: Sequence[float] | None
        if counts[0] >= 0:
            if differ(constants):
                return None  # a mean, divided by something of its batch once more
            parts = counts
        else:
            if references.cannot_tell((first.shape, term), constants, rows, first.whole):
                return None
            elements_of = [_elements(count) for count in counts]
            adds = references.is_additive((first.shape, term), constants, rows, first.whole, elements_of)
            parts = constants if adds else None
        shares = [1.0] * len(givers) if parts is None else [part / (sum(parts) or 1.0) for part in parts]
        column = [0.0] * size
        for rank, share in zip(givers, shares, strict=True):
            column[rank] = share
        columns.append(column)
    return [[column[rank] for column in columns] for rank in range(size)]


def _elements(count: float) -> float:
    """How many numbers a sum adds up, by what the header has of it; 0 where it is not known, or a mean."""
    return max(0.0, -1.0 - count)
