"""redis-py's own tests of its locks pass with our locks in place of its own.

They come from the source distribution of the redis-py that is installed, which pip brings once and pytest keeps.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

import only_one
from rigs.servers import RedisServer

ROOT = Path(only_one.__file__).parents[1]
"""Where our package is, for a process with another working directory."""

ENOUGH = 50
"""Tests of both kinds that there were in redis-py 5 already."""

PLUGIN = '''
"""Puts our locks in place of redis-py's before its tests are imported; the plugin of anyio runs its coroutines."""

import inspect
import sys
from types import ModuleType

import pytest
import redis.asyncio.lock
import redis.lock

from only_one.lock.redis_lock import AsyncLock, Lock

redis.lock.Lock = Lock
redis.asyncio.lock.Lock = AsyncLock
sys.modules["pytest_asyncio"] = ModuleType("pytest_asyncio")
sys.modules["pytest_asyncio"].fixture = pytest.fixture


@pytest.fixture(scope="session", autouse=True)
def anyio_backend():
    return "asyncio"


def pytest_collection_modifyitems(config, items):
    # Of redis-py before 7, which measures how long it has waited; later ones have a clock of their own for that.
    clocks = ("time.monotonic()", "loop().time()")
    # And what releases at once a lock of a tenth of a second, which a busy machine may take longer for.
    sources = [(item, inspect.getsource(item.function)) for item in items]
    timed = [item for item, source in sources if any(clock in source for clock in clocks)]
    timed += [item for item, source in sources if "timeout=0.1" in source and "sleep" not in source]
    config.hook.pytest_deselected(items=timed)
    items[:] = [item for item in items if item not in timed]


def pytest_runtest_setup(item):
    lock = item.module.Lock
    assert lock in {Lock, AsyncLock}, lock
'''


@pytest.fixture(scope="module")
def sources(pytestconfig: pytest.Config) -> Path:
    """The unpacked source distribution of the redis-py that is installed."""
    assert pytestconfig.cache is not None
    name = f"redis-{redis.__version__}"
    unpacked = pytestconfig.cache.mkdir("redis-py") / name
    if not unpacked.exists():
        with TemporaryDirectory(dir=unpacked.parent) as folder:
            download = ["pip", "download", "--quiet", "--no-deps", "--no-binary", "redis", "--dest", folder]
            unpack = ["tarfile", "-e", f"{folder}/{name}.tar.gz", folder]
            for command in ([*download, f"redis=={redis.__version__}"], unpack):
                subprocess.run([sys.executable, "-m", *command], check=True)
            Path(folder, name).rename(unpacked)
    return unpacked


def test_redis_pys_own_tests_of_its_locks(sources: Path, own_server: RedisServer, tmp_path: Path) -> None:
    """Of both kinds, on a server of their own, all of which they empty."""
    (tmp_path / "our_locks.py").write_text(PLUGIN)
    # As they are, and not as our own pytest.ini would have them; nor with plugins that are installed here, such as
    # pytest_asyncio.
    # Nor are the folders above looked into, as those of temporary files, which may be somebody else's.
    options = f"-p our_locks -p no:cacheprovider -c {os.devnull} -rs --rootdir . --confcutdir .".split()
    options += ["-p", "anyio", "-o", "anyio_mode=auto", "--redis-url", own_server.url]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "yes"}
    command = [sys.executable, "-m", "pytest", *options, "tests/test_lock.py", "tests/test_asyncio/test_lock.py"]
    ran = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-10_000:]
    assert int(re.findall(r"(\d+) passed", ran.stdout)[-1]) > ENOUGH
