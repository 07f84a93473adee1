"""Covering arrays and the smallest failing row: a table of options, rules between two of them, and nothing of attention.

options: {name: its values, the simplest first}. A row gives each option one of its values. A rule (a, b, fits) allows the
values of two options together where fits(value of a, value of b).
"""

import itertools
from collections import defaultdict


def forbidden_pairs(options, rules):
    """{(name, value): the (name, value) that never stand in one row with it}."""
    conflicts = defaultdict(set)
    for a, b, fits in rules:
        for x, y in itertools.product(options[a], options[b]):
            if not fits(x, y):
                conflicts[a, x].add((b, y))
                conflicts[b, y].add((a, x))
    return conflicts


def all_pairs(options, conflicts):
    """Every pair of values of two options that no rule forbids, as (item, item) with item = (name, value)."""
    return {((a, x), (b, y)) for a, b in itertools.combinations(options, 2)
            for x, y in itertools.product(options[a], options[b]) if (b, y) not in conflicts[a, x]}


class Builder:
    """One row in the making: the values chosen so far and those that are left for the others."""

    def __init__(self, options, conflicts):
        self.left, self.conflicts, self.chosen = dict(options), conflicts, {}

    def narrowed(self, item):
        """{name: what is left of it beside the item}, for the names that lose values; None where one would lose all."""
        lost = defaultdict(set)
        for name, value in self.conflicts[item]:
            if name not in self.chosen:  # what is chosen has taken its conflicts from what is left
                lost[name].add(value)
        narrowed = {name: [v for v in self.left[name] if v not in values] for name, values in lost.items()}
        return narrowed if all(narrowed.values()) else None

    def choose(self, item):
        """Whether the item can stand in the row; it does from here on if so."""
        name, value = item
        if name in self.chosen or value not in self.left[name]:
            return self.chosen.get(name) == value
        narrowed = self.narrowed(item)
        if narrowed is None:
            return False
        self.left |= narrowed
        self.chosen[name] = value
        return True


def completed(options, conflicts, items, rng, gain=lambda item, row: 0):
    """A row with the items in it, each other option by the largest gain; None where ten orders of the options find none."""
    for _ in range(10):
        row = Builder(options, conflicts)
        if not all(row.choose(item) for item in items):
            return None
        names = [name for name in options if name not in row.chosen]
        rng.shuffle(names)
        for name in names:
            values = rng.sample(row.left[name], len(row.left[name]))
            values.sort(key=lambda v: gain((name, v), row.chosen), reverse=True)
            if not any(row.choose((name, value)) for value in values):
                break
        else:
            return {name: row.chosen[name] for name in options}
    return None


def covering_rows(options, rules, rng, wanted=None):
    """Rows such that every pair of values of two options that can stand together does in one of them; greedily few.

    rng: random.Random, from which the rows follow. wanted: only these of all_pairs().
    """
    conflicts = forbidden_pairs(options, rules)
    open_pairs = defaultdict(set)  # item -> items that it has not been seen with
    queue = sorted(all_pairs(options, conflicts) if wanted is None else wanted, key=repr)
    for one, other in queue:
        open_pairs[one].add(other)
        open_pairs[other].add(one)
    rng.shuffle(queue)

    def gain(item, chosen):
        return len(open_pairs[item].intersection(chosen.items()))

    while queue:
        one, other = queue.pop()
        if other not in open_pairs[one]:
            continue
        row = completed(options, conflicts, (one, other), rng, gain)
        open_pairs[one].discard(other)  # also where no row can hold the two
        open_pairs[other].discard(one)
        if row is None:
            continue
        for item in row.items():
            open_pairs[item].difference_update(row.items())
        yield row


def repaired(row, name, options, rules):
    """The row, with options at their simplest value where a rule forbids them beside `name`; None where that is not enough."""
    row = dict(row)
    for _ in range(2):
        for a, b, fits in rules:
            if not fits(row[a], row[b]):
                other = b if a == name else a
                row[other] = options[other][0]
    broken = any(not fits(row[a], row[b]) for a, b, fits in rules)
    return None if broken else row


def smallest(row, options, rules, failing, cost, simpler):
    """A row that fails too and of which no option can be made simpler by itself; `row` itself fails.

    failing(row): the row, or one as simple, if it fails; else None. cost(name, value): a number, 0 for the simplest value.
    simpler(name, value): values to try in its place, the simplest first.
    """
    def total(row):
        return sum(cost(name, value) for name, value in row.items())

    changed = True
    while changed:
        changed = False
        for name in options:
            for value in simpler(name, row[name]):
                candidate = repaired({**row, name: value}, name, options, rules)
                if candidate is None or total(candidate) >= total(row):
                    continue
                found = failing(candidate)
                if found is not None:
                    row, changed = found, True
                    break
    return row
