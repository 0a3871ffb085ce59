"""Send the day's bill: cron starts this on two hosts, and one of them does it."""

import logging
import sys
from pathlib import Path

from only_one import only_one


@only_one("send-bill", at_least=30 * 60)
def main(outbox: str) -> None:
    """Put the bill into the outbox."""
    with Path(outbox).open("a") as box:
        box.write("bill of the day\n")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(*sys.argv[1:])
