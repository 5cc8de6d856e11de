"""Compute factors for each rank's gradients, so that their sum is the gradient of the whole batch. Runs in ranks.

A term of the loss is a sum over samples times a coefficient: 1 / n for a mean of n elements. A rank has computed it for
its samples, with the coefficient that it has there. The gradient of the whole batch is the sum over ranks of each
rank's gradient times (coefficient of the whole batch / coefficient here). These factors are pure arithmetic; a `Header`
holds the numbers for them, which ranks exchange before gradients.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nbaccel.base.values import frozen
from nbaccel.train.distributed.collectives import Collectives

__all__ = [
    "MOST_ZEROS",
    "TERMS",
    "VALUES",
    "Header",
    "LeastCount",
    "References",
    "Say",
    "Told",
    "as_floats",
    "differ",
    "digest",
    "exchange",
    "factors",
]

_NEAR = 1e-6
_FEW = 4
"""Samples of a part up to which their number may also be a constant of the program: `0.5 * x.sum()`."""


_BY_CHANCE = 2
"""Batches of another number of samples in which the count of a mask may be the same."""


class References:
    """Divisors of each term when its batch was whole in all ranks, and its numbers of samples and elements.

    Also what the parts have shown since. The first parts of a pass have different sizes in the ranks (see
    `BatchSplitter`): a divisor that depends on the samples differs between ranks then, and another one is a number of
    the program.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[float, float, float]] = {}
        self.has_counts = False  # divisors depend on the samples, and not only on their number
        self._additive: set[Hashable] = set()  # their divisors sum over the ranks
        self._of_program: set[Hashable] = set()  # they do not, whatever they become later
        self._alike: dict[Hashable, float] = {}  # equal in parts of different sizes, and not as before
        self._times_rows: set[Hashable] = set()  # means that are multiplied by the number of their samples
        self._guessed: dict[Hashable, tuple[float, float]] = {}  # additive by appearance, without a whole batch
        self._assumed: dict[Hashable, tuple[float, float, float]] = {}  # a number of the program, without any sign
        self._stayed: dict[Hashable, int] = {}  # how often it was the same with another number of samples
        self._changes = 0  # of what was found before

    @property
    def state(self) -> tuple[int, ...]:
        """Numbers that differ once anything here has changed, by which the same question may get another answer.

        What is known of a term is added, and never taken away.
        """
        known = self._found, self._additive, self._of_program, self._alike, self._times_rows, self._guessed
        return (*map(len, known), len(self._assumed), self._changes, sum(self._stayed.values()))

    def note(self, term: Hashable, constant: float, rows: float, elements: float = 0) -> None:
        found = constant, rows, elements
        known = self._found.get(term, found)
        self._changes += known != found
        self._found[term] = found
        if rows != known[1] and not differ([constant, known[0]]):
            self._note_that_it_stayed(term, constant, elements)

    def cannot_tell(self, term: Hashable, constants: Sequence[float], rows: Sequence[float], whole: float) -> bool:
        """Return whether a sum may have been divided by the number of samples or by a constant of the program.

        That is so where the sum was multiplied by it; where ranks have equally few samples; where a number of the first
        kind stays as rows change, or one of the second kind comes to differ between ranks, or suddenly is another whole
        number; or where parts of different sizes had one number, and then another one.
        """
        is_alike = not differ(constants)
        if _multiply(constants, rows):
            return True
        if term in self._of_program:
            return not is_alike
        if term in self._assumed:
            here, known = constants[0], self._assumed[term][0]
            return not is_alike or (differ([here, known]) and _is_whole(here))
        if term in self._additive and not is_alike:
            return False
        if term in self._guessed:
            constant, count = self._guessed[term]
            return rows[0] != count and constants[0] == constant
        if differ(rows) and is_alike and term in self._alike and differ([constants[0], self._alike[term]]):
            return True
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
        """Return whether the ranks' divisors of a sum add up to that of the whole batch, as ``len(x)`` does.

        Otherwise the divisor is a constant of the program. The evidence: it differs between ranks; it has shrunk as the
        batch has; it follows the number of summed elements (`elements`; 0 unknown); it is a whole number other than
        before, as the count of a mask is, and not a factor that is annealed.
        """
        if differ(constants):
            self._additive.add(term)
        if term in self._additive:
            return True
        if term in self._of_program:
            return False
        here, known = constants[0], self._found.get(term)
        if differ(rows):
            return self._is_count_by_chance(term, here, known)
        if known is None:
            is_it = bool(rows[0]) and rows[0] != whole and not here % rows[0] and bool(here % (whole or 1))
            is_it = is_it and not elements[0] % here
            if is_it:
                self._guessed[term] = here, rows[0]
            elif max(rows) > 1:
                self._found[term] = here, rows[0], elements[0]
                self._assumed[term] = here, rows[0], here
        elif math.isclose(here, known[0], rel_tol=_NEAR):
            # Equal to the whole batch's by chance, where samples of a part are longer: only a mean by hand is sure.
            is_it = known[2] == elements[0] == here and rows[0] != known[1]
            if not is_it and rows[0] != known[1]:
                self._note_that_it_stayed(term, here, elements[0])
        else:
            is_mean = bool(known[2] and elements[0]) and not differ([here * known[2], known[0] * elements[0]])
            is_it = is_mean or self.has_shrunk(term, here, rows[0])
            if not is_it:
                return _is_whole(here)
        if is_it:
            self._additive.add(term)
        return is_it

    def _note_that_it_stayed(self, term: Hashable, here: float, elements: float) -> None:
        """Note that a divisor was the same with another number of samples: it is the program's, as of accumulation.

        It may become another number later, as in a last short window. The count of a mask is the same by chance, and
        never larger than the number of summed elements.
        """
        self._stayed[term] = self._stayed.get(term, 0) + 1
        if 0 < elements < here or self._stayed[term] >= _BY_CHANCE:
            self._of_program.add(term)

    def _is_count_by_chance(self, term: Hashable, here: float, known: tuple[float, float, float] | None) -> bool:
        """Return whether a divisor is the count of a mask although parts of different sizes have the same."""
        before = [] if known is None else [known[0]]
        before += [self._alike[term]] if term in self._alike else []
        is_whole = _is_whole(here)
        if not is_whole or (here != 1 and any(not differ([here, each]) for each in before)):
            self._of_program.add(term)
        self._alike.setdefault(term, here)
        is_other = known is not None and differ([here, known[0]])
        return is_other and is_whole and term not in self._of_program

    def has_shrunk(self, term: Hashable, here: float, rows: float) -> bool:
        """Return whether a divisor is smaller than with a whole batch by the same factor as the batch."""
        constant, count, _ = self._found.get(term, (0.0, 0.0, 0.0))
        return bool(count) and rows != count and math.isclose(here, constant * rows / count, rel_tol=_NEAR)

    def adds_up_alone(self, term: Hashable, constants: Sequence[float], rows: Sequence[float]) -> bool | None:
        """Return whether the divisors of a term of parameters alone add up over the ranks to that of the whole batch.

        An example is a penalty that is divided by ``len(x)``. Return None if the divisor was taken for a constant of
        the program before, and depends on the number of samples after all.
        """
        if differ(constants):
            self._additive.add(term)
        elif differ(rows):
            self._of_program.add(term)
        elif term not in self._of_program and self.has_shrunk(term, constants[0], rows[0]):
            self._additive.add(term)
        is_it = term in self._additive
        here, count = constants[0], rows[0]
        return None if count and self._was_taken_wrongly(term, is_it, here, count, here / count) else is_it

    def is_times_rows(
        self, term: Hashable, constants: Sequence[float], rows: Sequence[float], whole: float
    ) -> bool | None:
        """Return whether a mean is multiplied by the number of its samples, so that it is a sum.

        Return None if the factor is neither the number of samples nor a constant, if that is not known yet, or if an
        earlier batch was judged wrongly.
        """
        if differ(constants):
            if not all(rows) or differ([constant * count for constant, count in zip(constants, rows, strict=True)]):
                return None
            self._times_rows.add(term)
        elif differ(rows):
            self._of_program.add(term)
        elif term not in self._of_program and rows[0] and self._has_grown(term, constants[0], rows[0]):
            self._times_rows.add(term)
        is_it = term in self._times_rows
        here, count = constants[0], rows[0]
        is_as_many = 1 < count < whole and not differ([here * count, 1.0])
        if is_as_many and term not in self._found and term not in self._of_program and not is_it:
            return None
        return None if count and self._was_taken_wrongly(term, is_it, here, count, here * count) else is_it

    def _was_taken_wrongly(self, term: Hashable, is_it: bool, here: float, rows: float, rate: float) -> bool:
        """Return whether a number was taken for the program's in batches without evidence, and depends on the samples.

        Args:
            rate: A value that stays the same if it does.
        """
        if term in self._found or term in self._of_program:
            return False
        if is_it:
            return term in self._assumed
        known, count, known_rate = self._assumed.setdefault(term, (here, rows, rate))
        return rows != count and differ([here, known]) and not differ([rate, known_rate])

    def _has_grown(self, term: Hashable, here: float, rows: float) -> bool:
        constant, count, _ = self._found.get(term, (0.0, 0.0, 0.0))
        return bool(count) and rows != count and math.isclose(here, constant * count / rows, rel_tol=_NEAR)


def _multiply(divisors: Sequence[float], rows: Sequence[float]) -> bool:
    """Return whether divisors are smaller in proportion to the samples, as of a sum that is multiplied by them."""
    return differ(divisors) and not differ([each * row for each, row in zip(divisors, rows, strict=True)])


def _is_whole(number: float) -> bool:
    """Return whether `number` may be a count."""
    return math.isfinite(number) and not differ([number, round(number)])


def differ(numbers: Sequence[float]) -> bool:
    """Return whether `numbers` are not all the same, except for rounding."""
    return any(not math.isclose(each, numbers[0], rel_tol=_NEAR) for each in numbers)


class LeastCount(Exception):
    """A count that divides a loss may stand for none in a part, as in ``max(count, 1)``."""


def factors(
    header: Header, givers: Sequence[int], of_parameters: Sequence[bool], references: References
) -> list[list[float]] | None:
    """Return for each rank the weights of its terms' gradients; None where they are unknown.

    Args:
        givers: Ranks whose gradients count; those of others do not.
        of_parameters: By term, whether it is without a batch.

    Raises:
        LeastCount: They are not known.
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
    if not is_alike or not header.all_equal("zeros", givers):  # or times a number of the part, zero in some of them
        return None
    if not count:
        rows = [says[rank].rows if rank in givers else 0.0 for rank in range(size)]
        if not sum(rows) or any(each < 0 for rank in givers for each in header.counts[rank]):
            return None
        return [[each / sum(rows)] * max(1, int(say.terms)) for each, say in zip(rows, says, strict=True)]
    columns = []
    rows = [says[rank].rows for rank in givers]
    for term in range(count):
        key = first.shape, term
        counts = [header.counts[rank][term] for rank in givers]
        constants = [header.constants[rank][term] for rank in givers]
        parts: Sequence[float] | None
        factor_of = [1.0] * len(givers)
        if of_parameters[term]:
            adds = references.adds_up_alone(key, constants, rows)
            if adds is None:
                return None
            parts = constants if adds else None
        elif counts[0] >= 0:
            is_sum = references.is_times_rows(key, constants, rows, first.whole)
            if is_sum is None:
                return None  # a mean, divided by a quantity of its batch once more, or an unknown case
            parts = counts
            if is_sum:  # each rank's is multiplied by its rows, and the whole batch's would be by all of them
                factor_of = [sum(rows) / row for row in rows]
        else:
            values = [header.values[rank][:1] for rank in givers]
            if references.cannot_tell(key, constants, rows, first.whole) or _lose_samples(constants, values):
                return None
            elements_of = [_elements(count) for count in counts]
            adds = references.is_additive(key, constants, rows, first.whole, elements_of)
            told = [(says[rank].least, row, value) for rank, row, value in zip(givers, rows, values, strict=True)]
            # Otherwise the 1 is the only sample, which has a loss.
            least = [each if row > 1 or each == 2 or value == [0.0] else 0.0 for each, row, value in told]
            parts = _without_empty(constants, rows, values if count == 1 else [], least) if adds else None
            if parts is not None:
                shares = [part / row for part, row in zip(parts, rows, strict=True) if row]
                references.has_counts |= len(shares) == len(rows) and differ(shares)
                if references.has_counts:
                    # A masked part without any has no loss; also where the count has a factor.
                    least = [
                        2.0 if each and value == [0.0] else each for each, value in zip(least, values, strict=True)
                    ]
                if any(_may_be_none(part, each, parts) for part, each in zip(parts, least, strict=True)):
                    raise LeastCount
        shares = [1.0] * len(givers) if parts is None else [part / (sum(parts) or 1.0) for part in parts]
        column = [0.0] * size
        for rank, share, factor in zip(givers, shares, factor_of, strict=True):
            column[rank] = factor * share * (even[rank] if of_parameters[term] else 1.0)
        columns.append(column)
    return [[column[rank] for column in columns] for rank in range(size)]


def _lose_samples(divisors: Sequence[float], values: Sequence[Sequence[float]]) -> bool:
    """Return whether a part divides samples by a count of none, of which its loss is infinite; nan has none of them."""
    pairs = zip(divisors, values, strict=True)
    return any(divisor == 0 and not (value and math.isnan(value[0])) for divisor, value in pairs)


def _may_be_none(divisor: float, least: float, divisors: Sequence[float]) -> bool:
    """Return whether one of the ranks' divisors may be a least count, which may have a factor: `loss / (2 * count)`."""
    return least == 1 == divisor or (least == 2 and divisor > 0 and all(_is_whole(each / divisor) for each in divisors))


def _without_empty(
    divisors: Sequence[float], rows: Sequence[float], values: Sequence[Sequence[float]], least: Sequence[float]
) -> Sequence[float]:
    """Return the ranks' divisors, with 0 for a 1 of an empty mask: ``m.sum().clamp(min=1)``. Its sum is 0, too.

    Args:
        values: The loss of each rank, where it is this term alone.
        least: By rank, 2 where a count was given a least value; it may have a factor.
    """
    if not values:
        return divisors
    return [
        0.0 if ((divisor == 1 and count > 1) or each == 2) and value == [0.0] else divisor
        for divisor, count, value, each in zip(divisors, rows, values, least, strict=True)
    ]


def _elements(count: float) -> float:
    """Return how many numbers a sum adds, by the header's count; 0 where it is not known, or a mean."""
    return max(0.0, -1.0 - count)


TERMS = 6
VALUES = 5
MOST_ZEROS = 52
"""Terms that have a bit of their own in a float; all further ones share the last."""


@dataclass(slots=True)
class Say:
    """The numbers that one rank sends to the others before each exchange of gradients.

    Args:
        done: 1 if its program is over.
        new: The number of leaves that have to be registered.
        leaves: A digest of the leaves that the backward reaches.
        extras: 1 if the backward runs others inside.
        shape: A digest of the loss's terms; 0 if they are not known.
        terms: The number of these terms.
        part: 1 if its batch is a part of one.
        own: 1 if each rank has another batch.
        rows: The number of samples of its batch.
        whole: The number of samples of the whole batch of which it has a part.
        obstacle: Not 0 if the loss is no sum over samples.
        zeros: A bit for each term of the loss that is multiplied by zero.
        apart: A bit for each term that was seen to depend on no batch.
        gives: 1 if its gradient counts.
        least: 1 if the loop may divide by the larger one of a count and 1, and the count may be none here; 2 if one is.
        at: The number of its step.
        steps: The number of steps of optimizers so far.
        batches: The number of batches that were handed out, where they are cut; else 0.
        drawn: A digest of the sample numbers of these batches, before they were cut.
        noise: A digest of the states of the other random generators at that time.
        lengths: A digest of the lengths of tensors below the loss, in the first batches that are cut, and now and then.
        rates: A digest of the learning rates since the exchange before.
        outside: A digest of what the loss uses beside its batch, in the first batches and at doublings; else 0.
        check: A sum of weights, now and then.
    """

    done: float = 0
    new: float = 0
    leaves: float = 0
    extras: float = 0
    shape: float = 0
    terms: float = 0
    part: float = 0
    own: float = 0
    rows: float = 0
    whole: float = 0
    obstacle: float = 0
    zeros: float = 0
    apart: float = 0
    gives: float = 1
    least: float = 0
    values: float = 0
    at: float = 0
    steps: float = 0
    batches: float = 0
    drawn: float = 0
    noise: float = 0
    lengths: float = 0
    rates: float = 0
    outside: float = 0
    check: float = 0


_NAMES = [field.name for field in fields(Say)]
_PASSING = slice(_NAMES.index("at"), len(_NAMES))
"""Numbers that change from one backward to the next: equal in all ranks, or ranks are out of step."""

_VALUES = slice(len(_NAMES), len(_NAMES) + VALUES)
_LEAVES_AT, _EXTRAS_AT, _TERMS_AT = map(_NAMES.index, ("leaves", "extras", "terms"))
_numbers = operator.attrgetter(*_NAMES)


@frozen
class Header:
    """Numbers of all ranks, by rank.

    They are a few numbers of each rank in one small collective. They detect ranks whose programs have taken different
    ways before anything is summed.

    Args:
        counts, constants: Those of each term, as `Term` has them; for a sum of n numbers a count of -1 - n.
        values: The values of losses, before the backward.
    """

    says: list[Say]
    counts: list[list[float]]
    constants: list[list[float]]
    values: list[list[float]]

    def all_equal(self, name: str, ranks: Iterable[int]) -> bool:
        said = {getattr(self.says[rank], name) for rank in ranks}
        return len(said) <= 1

    def any(self, name: str) -> bool:
        return any(getattr(say, name) for say in self.says)

    def share_of_samples(self, rank: int, givers: Sequence[int]) -> float:
        """Return the share of `rank` in the batch's samples: the weight of values that a forward stores of them."""
        rows = {giver: self.says[giver].rows for giver in givers}
        if not all(rows.values()) or not any(self.says[giver].part for giver in givers):
            rows = dict.fromkeys(givers, 1.0)
        return rows.get(rank, 0.0) / sum(rows.values())


class Told:
    """Numbers that the ranks have sent at one meeting, a row for each, as they came.

    Args:
        pairs: Count and constant of each term, by rank.
    """

    def __init__(self, rows: list[list[float]], pairs: list[list[float]]) -> None:
        self._rows = rows
        self._pairs = pairs

    def decisive(self) -> tuple[Any, ...] | None:
        """Return all that decides how gradients are summed; None where the ranks differ in what does not repeat.

        A loss of zero may be that of no samples, so its value decides, too; and where no rank has a part it decides
        whether the ranks have the same one. Where ranks reach different leaves, or a backward runs others inside, to
        decide takes a collective, which each rank has to enter: one may find a decision that another has not kept.
        """
        one = self._rows[0]
        first, leaves, loss, are_alike = one[_PASSING], one[_LEAVES_AT], one[_VALUES.start], True
        for row in self._rows:
            value = row[_VALUES.start]
            if row[_PASSING] != first or not value or row[_LEAVES_AT] != leaves or row[_EXTRAS_AT]:
                return None
            are_alike = are_alike and value == loss
        lasting = [tuple(row[: _PASSING.start]) for row in self._rows]
        return are_alike, *lasting, *map(tuple, self._pairs)

    def any(self, name: str) -> bool:
        at = _NAMES.index(name)
        return any(row[at] for row in self._rows)

    def values(self) -> list[list[float]]:
        """Return the losses of each rank, before the backward."""
        count = _NAMES.index("values")
        return [row[_VALUES][: int(row[count])] for row in self._rows]

    def header(self) -> Header:
        """Return the same by name."""
        says = [Say(*row[: len(_NAMES)]) for row in self._rows]
        return Header(
            says,
            [row[0 : 2 * int(each.terms) : 2] for row, each in zip(self._pairs, says, strict=True)],
            [row[1 : 2 * int(each.terms) : 2] for row, each in zip(self._pairs, says, strict=True)],
            self.values(),
        )


def exchange(
    collectives: Collectives, call: str, say: Say, terms: Sequence[tuple[float, float]], values: Sequence[float]
) -> Told:
    """Send `say` to all ranks, and return what all of them sent. Collective.

    Args:
        terms: Count and constant of each; where there are more than `TERMS` a second collective follows.
        values: At most `VALUES`.
    """
    say.terms, say.values = len(terms), len(values)
    short = [number for pair in terms[:TERMS] for number in pair] + [0.0] * (2 * max(0, TERMS - len(terms)))
    mine = [*map(float, _numbers(say)), *values, *[0.0] * (VALUES - len(values)), *short]
    rows = collectives.tell_numbers(call, mine)
    most = int(max(row[_TERMS_AT] for row in rows))
    if most > TERMS:
        longer = [number for pair in terms for number in pair] + [0.0] * (2 * (most - len(terms)))
        pairs = collectives.tell_numbers(call, longer)
    else:
        pairs = [row[_VALUES.stop :] for row in rows]
    return Told(rows, pairs)


def digest(text: str) -> int:
    """Return a number of 32 bits, exact in a float, and never 0."""
    return zlib.crc32(text.encode()) | 1


def as_floats(entries: Sequence[float | Tensor]) -> list[float]:
    """Return each entry as a number; those on a device are fetched together."""
    away = [entry for entry in entries if isinstance(entry, Tensor) and entry.device.type != "cpu"]
    fetched = iter(torch.stack([each.detach().reshape(()).double() for each in away]).tolist() if away else ())
    return [
        next(fetched) if isinstance(each, Tensor) and each.device.type != "cpu" else float(each) for each in entries
    ]
