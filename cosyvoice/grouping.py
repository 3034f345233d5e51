"""Splitting items of different lengths into padded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def plan_groups(
    lengths: Sequence[int],
    cost: Callable[[int, int], float],
    budget: float,
    max_rows: int,
    max_padding: float = 0.1,
) -> list[list[int]]:
    """Group items by length.

    Args:
        lengths: length of each item, at least 1.
        cost: ``cost(rows, longest)``, what a batch takes, e.g. in bytes.
        budget: highest cost of a group; an item that exceeds it alone gets a group of its own.
        max_rows: most items in a group.
        max_padding: highest fraction of a group's steps that may be padding.

    Returns:
        positions of the items, each once; groups from the longest items to the shortest.
    """
    groups: list[list[int]] = []
    steps = 0
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups:
            rows, longest = len(groups[-1]) + 1, lengths[groups[-1][0]]
            padding = 1 - (steps + lengths[item]) / (rows * longest)
            if rows <= max_rows and padding <= max_padding and cost(rows, longest) <= budget:
                groups[-1].append(item)
                steps += lengths[item]
                continue
        groups.append([item])
        steps = lengths[item]
    return groups


def padding_fraction(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> float:
    """Fraction of all steps, over all groups, that are padding."""
    padded = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    return 1 - sum(lengths[i] for group in groups for i in group) / padded if padded else 0.0
