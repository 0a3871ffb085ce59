"""The application of docs/recipes/fastapi.md, whose job waits for the test; and another way to start it.

Its annotations are no strings: older releases of FastAPI cannot read those of a decorated endpoint.
"""

import os
from importlib import import_module
from typing import Any

from fastapi import BackgroundTasks, FastAPI
from redis.asyncio import Redis

from only_one import only_one
from only_one.inspection import held
from rigs.waiting import LIMIT

URL = os.environ["ONLY_ONE_REDIS_URL"]
main: Any = import_module("main")  # in the folder into which it was copied
app: FastAPI = main.app


async def write_report(shop: str) -> None:
    """Write down that it has begun, wait until the test lets it end, and write down that it has ended."""
    async with Redis.from_url(URL, socket_timeout=None) as client:
        await client.rpush("jobs", f"{shop} begins")
        await client.blpop([f"let {shop} end"], timeout=10 * LIMIT)
        await client.rpush("jobs", f"{shop} ends")


main.write_report = write_report


@app.post("/later/{shop}", status_code=202)
async def start_later(shop: str, background: BackgroundTasks) -> list[str]:
    """With a background task alone: which keys are held when the response is made."""
    background.add_task(only_one("later:{shop}")(write_report), shop)
    return [each.key for each in held("later:*")]
