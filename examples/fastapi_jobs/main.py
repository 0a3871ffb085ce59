"""A double click starts one job: the second request gets 409, and says which job runs, and since when."""

import asyncio
import logging
from datetime import datetime, timezone
from typing import Any

from fastapi import BackgroundTasks, FastAPI, Request
from fastapi.responses import JSONResponse

from only_one import AlreadyRunning, current_lock, fail, only_one

logging.basicConfig(level=logging.INFO)  # uvicorn shows its own loggers only
app = FastAPI()


def shown(holder: Any) -> dict[str, str]:
    """Which job holds the key, and since when."""
    return {"job": holder.id, "since": datetime.fromtimestamp(holder.since, timezone.utc).isoformat()}


async def write_report(shop: str) -> None:
    """What takes long."""
    await asyncio.sleep(20)
    print(f"the report of {shop} is written", flush=True)


@only_one("report:{shop}", when_busy=fail)
async def report(shop: str, begun: asyncio.Future[dict[str, str]]) -> None:
    """The job. When it runs, and only then, it has the key."""
    begun.set_result(shown(current_lock().holder))
    await write_report(shop)


@app.exception_handler(AlreadyRunning)
async def already_running(_request: Request, error: AlreadyRunning) -> JSONResponse:
    """Answer to the second click."""
    return JSONResponse({"detail": "is running already", **shown(error.holder)}, status_code=409)


@app.post("/reports/{shop}", status_code=202)
async def start_report(shop: str, background: BackgroundTasks) -> dict[str, str]:
    """Start the job; answer as soon as it has begun."""
    begun: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    job: asyncio.Future[None] = asyncio.create_task(report(shop, begun))
    await asyncio.wait((job, begun), return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        await job  # it did not begin: this raises AlreadyRunning
    background.add_task(asyncio.wait_for, job, None)  # uvicorn waits for it at shutdown, and logs its errors
    return begun.result()
