"""Add up the orders of each shop: lines of `shop amount`, from the files that are named, else from standard input."""

import fileinput
import logging
import os
import sys
from collections import Counter

from only_one import only_one


@only_one("nightly-report", when_busy=lambda _: sys.exit(os.EX_TEMPFAIL))
def main() -> None:
    """Print the report."""
    amounts: Counter[str] = Counter()
    with fileinput.input() as orders:
        for order in orders:
            shop, amount = order.split()
            amounts[shop] += int(amount)
    for shop, total in amounts.most_common():
        print(f"{total:8} {shop}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main()
