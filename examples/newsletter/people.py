"""People who are made up, as many as one likes, and the tags by which the newsletter chooses among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .recipients import Recipient

INCLUDE = ["customer", "reader"]
EXCLUDE = ["complained", "moved"]

FIRST = ["Ada", "Grace", "José", "Zoë", "Jürgen", "明", "Maria", "O'Neil", "Tom & Ann", '"Bo"']
LAST = ["Lovelace", "Hopper", "García", "Müller", "Ng", "<Smith>", "Çelik", "d'Arc"]

KINDS: dict[int, tuple[bool, Sequence[str]]] = {
    0: (True, ["customer"]),
    5: (False, ["customer", "complained"]),
    10: (False, ["reader", "moved"]),
    15: (False, ["supplier"]),
    16: (True, ["reader", "complained"]),
    17: (False, ["customer", "reader"]),
    18: (False, ["reader", "supplier"]),
}
"""Of twenty people, those who are not just customers: whether they have unsubscribed, and their tags."""

PERIOD = 20


def is_chosen(number: int) -> bool:
    """Whether the newsletter is for somebody.

    Args:
        number: the person's id.
    """
    unsubscribed, tags = KINDS.get(number % PERIOD, (False, ["customer"]))
    return not unsubscribed and bool({*INCLUDE} & {*tags}) and not {*EXCLUDE} & {*tags}


def crowd(chosen: int) -> Iterator[tuple[Recipient, bool, Sequence[str]]]:
    """People of whom some are chosen.

    Args:
        chosen: how many that shall be.

    Yields:
        Each with whether they have unsubscribed, and their tags.
    """
    number = 0
    while chosen:
        number += 1
        name = f"{FIRST[number % len(FIRST)]} {LAST[number % len(LAST)]}"
        unsubscribed, tags = KINDS.get(number % PERIOD, (False, ["customer"]))
        yield Recipient(number, f"person-{number}@example.net", name), unsubscribed, tags
        chosen -= is_chosen(number)
