"""The application of docs/recipes/fastapi.md, whose job waits for the test."""

import os
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from redis.asyncio import Redis

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
