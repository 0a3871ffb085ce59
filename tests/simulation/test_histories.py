"""Fresh histories of both worlds, and those that were red once, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("redis.driver_info", reason="the worlds put parts of their own in the place of redis-py's")

ROOT = Path(__file__).parents[2]
ONCE_RED = {
    ("--greets",): "103 344 395 425 449 474 475 478 501 506 507 557 591 622 656 676 696 784 956 1161 1506 5009",
    ("--messages",): "702181 800614 90017972 268511935 269783389 273000024 283003800 286017298 286018353 102764 234817 "
    "310078822 310110281 310020237 310075046 316009522 320116444 320307620 321013124 324009804 "
    "324012992 327000360 327002472 327010048 327012414 327035437 366100057 376009411 1796086354158899 "
    "1796089961927395 1796104000001334 1796320000052974 1796360000011817 "
    "1796361000009911 1796371000015331 1796371000008836",
    (): "212036199 215048578 215148403 218018308 218290299 257001899 258000666 510003193 1795616705342652 "
    "268423909 268431008 268440056 268440190 297000921 295010162 303011490 300000567 1795962687026480 "
    "329013679 1795995359535298 335000011 335000331 335000334 336003571 350021557 350022439 350026591 "
    "357121839 404000055 390012697 600029559 600071641 "
    "1796300000008655 1796300000015003 1796310000054351 1796368000014171 "
    "1796368000093197",
}
"""Seeds of histories that showed a defect, by the arguments for their world."""


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", "--jobs", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_fresh_histories_keep_every_promise() -> None:
    """Others each time, of both worlds; a red one is shown by the command that plays it again."""
    begin = time.time_ns() // 1000
    print(f"the histories of {begin} and the 999 seeds after it")
    played = play("--both", "--jobs", "2", "--begin", str(begin), "--histories", "1000")
    assert played.returncode == 0, played.stdout


@pytest.mark.parametrize("world", ONCE_RED)
def test_histories_that_were_red_once_keep_every_promise(world: tuple[str, ...]) -> None:
    played = play(*world, "--seeds", *ONCE_RED[world].split())
    assert played.returncode == 0, played.stdout


def test_a_history_is_the_same_each_time() -> None:
    assert play("--seed", "7").stdout == play("--seed", "7").stdout
