"""Settings in a Celery app's configuration: `only_one_redis`, `only_one_prefix` and the others, in its namespace."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from celery import Celery, _state
from kombu.utils.imports import symbol_by_name

from only_one.connections.server import Source
from only_one.errors import ConfigurationError
from only_one.events import logger
from only_one.settings import CONFIGURABLE, Options, check

_NEARLY_OURS = re.compile(rf"(\w+_)?only_one_({'|'.join(CONFIGURABLE)})\w*", re.IGNORECASE)

_warned: set[tuple[str | None, str]] = set()

import_by_name: Callable[[str], Any] = symbol_by_name


def current_app() -> Celery | None:
    """The app whose settings a plain function has, too: the only one of this process, or else Celery's default.

    Not the thread's current app: one function would have other keys in other threads.
    The app is not made to load its configuration, because it may be given more before it does: until then, this is a
    copy.
    """
    registered: Any = _state._get_active_apps()  # noqa: SLF001 - the only list of them
    references = registered.data.copy()  # at once, as other threads may make apps meanwhile
    apps = {app for app in (reference() for reference in references) if app is not None and app.set_as_current}
    if len(apps) > 1:
        apps &= {_state.default_app}
    for app in apps:
        return app if app.configured else Celery(**{**app.__reduce_keys__(), "fixups": (), "set_as_current": False})
    return None


def app_options(app: Celery | None) -> tuple[Options, Callable[[], Source | None]]:
    """The settings of an app, and where its own server is.

    Args:
        app: a task's app; None for a plain function, which has the settings of the current app, if there is one.
    """
    app = app or current_app()
    return ({}, lambda: None) if app is None else (settings_of(app), functools.partial(server_of, app))


def settings_of(app: Celery) -> Options:
    """The settings in an app's configuration, which is loaded by then.

    Raises:
        ConfigurationError: for one that could not work.
    """
    configured: dict[str, Any] = {name: app.conf.get(f"only_one_{name}") for name in CONFIGURABLE}
    _warn_of_others(app)
    # A settings module that takes a value from the environment has None where the environment has no such value.
    given = {name: value for name, value in configured.items() if value is not None}
    if isinstance(configured["when_busy"], str):
        given["when_busy"] = _import_policy(configured["when_busy"])
    try:
        return check(given, {})
    except ConfigurationError as error:
        msg = f"the configuration of the app {app.main!r} has only_one_{error}"
        raise ConfigurationError(msg) from None


def _warn_of_others(app: Celery) -> None:
    """Warn once of each setting that is not read: in another namespace, or without one, or of nearly the same name."""
    namespace = f"{app.namespace.rstrip('_')}_" if app.namespace else ""
    ours = [f"only_one_{name}" for name in CONFIGURABLE]
    read = [(namespace + each).upper() if namespace.isupper() else (namespace + each).lower() for each in ours]
    for name in map(str, app.conf):
        if _NEARLY_OURS.fullmatch(name) and name not in {*ours, *read} and (app.main, name) not in _warned:
            _warned.add((app.main, name))
            logger.warning(
                "the configuration of the app %r has %s, which is not read: write %s", app.main, name, ", ".join(read)
            )


def _import_policy(path: str) -> Any:
    try:
        return import_by_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        msg = (
            f"only_one_when_busy={path!r} cannot be imported ({error}): write 'only_one.fail' or 'package.module.name'"
        )
        raise ConfigurationError(msg) from None


def server_of(app: Celery) -> Source | None:
    """The server that the app has anyhow: its result backend if that is Redis, else its broker if that is.

    Raises:
        ConfigurationError: if that cannot be known.
    """
    backend = app.conf.result_backend
    if _speaks_redis(backend) and not app.conf.redis_backend_use_ssl:
        return _url(backend)
    client = getattr(app.backend, "client", None)
    if hasattr(client, "register_script"):
        return client
    brokers = app.conf.broker_read_url or app.conf.broker_url
    broker: Any = next(iter(brokers.split(";") if isinstance(brokers, str) else brokers or ()), None)
    if _speaks_redis(broker) and not app.conf.broker_use_ssl:
        return _url(broker)
    if _speaks_redis(broker) or str(broker).startswith("sentinel://"):
        # Not localhost: on each machine that would be another server.
        msg = (
            f"the broker of the app {app.main!r} is a Redis whose URL does not say all, because of sentinels or "
            "broker_use_ssl: write only_one_redis=... in its configuration, a URL, a client or a callable"
        )
        raise ConfigurationError(msg)
    return None


def _speaks_redis(url: Any) -> bool:
    return isinstance(url, str) and url.startswith(("redis://", "rediss://", "redis+socket://")) and ";" not in url


def _url(url: str) -> str:
    """The URL as redis-py understands it."""
    return url.replace("redis+socket://", "unix://").replace("virtual_host=", "db=")
