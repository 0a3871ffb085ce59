"""Count the orders: the lines of the files that are named, else of standard input."""

import fileinput
import logging
import os
import sys

from only_one import only_one


@only_one("nightly-report", when_busy=lambda _: sys.exit(os.EX_TEMPFAIL))
def main() -> None:
    """Print the report."""
    with fileinput.input() as orders:
        print(len(list(orders)), "orders")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main()
