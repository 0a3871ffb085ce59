"""Settings in a Celery app's configuration: ``only_one_redis``, ``only_one_prefix`` and others, in its namespace."""

import functools
import re
from collections.abc import Callable
from typing import Any

from celery import Celery, _state
from kombu.utils.imports import symbol_by_name

from only_one.connections.server import Source
from only_one.errors import ConfigurationError
from only_one.events import warn_once
from only_one.settings import CHECKS, CONFIGURABLE, Options, check

_NEARLY_OURS = re.compile(rf"(\w+_)?only_one_({'|'.join(CHECKS)})\w*", re.IGNORECASE)

_import_by_name: Callable[[Any], Any] = symbol_by_name


def current_app() -> Celery | None:
    """The app whose settings plain functions have, too: this process's only app, or else Celery's default app.

    It is not the thread's current app, with which a function would have other keys in other threads.
    If the app has not loaded its configuration, this is a copy of it: the user may yet configure the app itself.
    """
    # Copied, because other threads may make apps meanwhile.
    active: Any = _state._get_active_apps()  # noqa: SLF001 - the only list of them
    apps = {app for app in (reference() for reference in active.data.copy()) if app is not None and app.set_as_current}
    for app in apps if len(apps) == 1 else apps & {_state.default_app}:
        return app if app.configured else Celery(**{**app.__reduce_keys__(), "fixups": (), "set_as_current": False})
    return None


def app_options(app: Celery | None) -> tuple[Options, Callable[[], Source | None]]:
    """The settings of an app, and a function that gives its own server.

    Args:
        app: a task's app; None for a plain function, which has the settings of the current app, if there is one.

    Raises:
        ConfigurationError: for a setting that cannot work.
    """
    app = app or current_app()
    if app is None:
        return {}, lambda: None
    configured: dict[str, Any] = {name: app.conf.get(f"only_one_{name}") for name in CONFIGURABLE}
    _warn_of_others(app)
    path = configured["when_busy"]
    try:  # a value that is no str is returned unchanged
        configured["when_busy"] = _import_by_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        instead = "write 'only_one.fail', or 'package.module.name' of a policy of yours, such as one made by retry()"
        msg = f"only_one_when_busy={path!r} cannot be imported ({error}): {instead}"
        raise ConfigurationError(msg) from None
    # A setting that is None counts as unset: settings modules have it for a variable that the environment lacks.
    given = {name: value for name, value in configured.items() if value is not None}
    try:
        return check(given, {}), functools.partial(server_of, app)
    except ConfigurationError as error:
        msg = f"in the configuration of the app {app.main!r}, only_one_{error}"
        raise ConfigurationError(msg) from None


def _warn_of_others(app: Celery) -> None:
    """Warn once of each setting of ours that is not read.

    It may be in another namespace or in none, be misspelt, or be an option that only the decorator takes.
    """
    namespace = f"{app.namespace.rstrip('_')}_" if app.namespace else ""
    spell = str.upper if namespace.isupper() else str.lower
    ours = [f"only_one_{name}" for name in CONFIGURABLE]
    read = [spell(namespace + each) for each in ours]
    for name in map(str, app.conf):
        is_meant = name.startswith(spell(f"{namespace}only_one_")) or _NEARLY_OURS.fullmatch(name)
        is_unread = is_meant and name not in {*ours, *read}
        if is_unread:
            text = "the configuration of the app %r has %s, which is not read: write %s"
            warn_once((app.main, name), text, app.main, name, ", ".join(read))


def server_of(app: Celery) -> Source | None:
    """The app's own server: its result backend if that is Redis, else its broker if that is Redis.

    Raises:
        ConfigurationError: if that cannot be known.
    """
    names = ("backend_use_ssl", "backend_credential_provider", "host", "port", "username", "password")
    if url := _whole_url(app, app.conf.result_backend, "redis", names):
        return url
    client = getattr(app.backend, "client", None)
    if hasattr(client, "register_script"):
        return client
    brokers = app.conf.broker_read_url  # `broker_url`, if not configured
    broker: Any = next(iter(brokers.split(";") if isinstance(brokers, str) else brokers or ()), None)
    if url := _whole_url(app, broker, "broker", ("use_ssl", "host", "port", "user", "password", "vhost")):
        return url
    # Celery reads a URL in capitals, too. Without a URL, `broker` may be a host, and the transport says the kind.
    kind = broker if "://" in str(broker) else app.conf.broker_transport
    if str(kind).lower().startswith(("redis", "sentinel")):
        # The default, localhost, would be another server on each machine.
        msg = (
            f"the broker of the app {app.main!r} is a Redis whose URL does not say all, because of sentinels, "
            "broker_use_ssl, a credential provider, or broker_host and the like: "
            "write only_one_redis=... in its configuration, a URL, a client or a callable"
        )
        raise ConfigurationError(msg)
    return None


def _whole_url(app: Celery, url: Any, kind: str, names: tuple[str, ...]) -> str | None:
    """The URL as redis-py understands it; None if it is not the URL of one Redis server, or does not say all of it.

    It does not if a setting with one of ``names`` adds to it, or a credential provider does.
    """
    says_all = "credential_provider=" not in str(url) and not any(app.conf.get(f"{kind}_{name}") for name in names)
    is_one = isinstance(url, str) and re.fullmatch(r"(rediss?|redis\+socket)://[^;]*", url)
    ours = re.sub(r"(?<=ssl_cert_reqs=)CERT_\w+", lambda name: name[0][5:].lower(), url) if is_one and says_all else ""
    ours = re.sub("(?<![:/])//", "/", ours)  # kombu reads `redis://host//` as database 0
    ours = re.sub("virtual_host=/?", "db=", ours)  # with or without the slash of a path
    return ours.replace("redis+socket://", "unix://") or None
