"""Where a URL leads: protocol, host, folder, options. A URL never holds credentials."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from resilio.errors import ConfigError
from resilio.storage import check_key
from resilio.storage.registry import without_credentials

__all__ = ["Place", "flag", "parse"]


@dataclass(frozen=True)
class Place:
    """A URL, taken apart.

    Attributes:
        url: the URL as it is shown.
        protocol: what is before ``://``, without ``fsspec+``.
        host: bucket, container or host; to the letter.
        folder: where the keys begin, without slashes at its ends; to the letter, ``%20`` is no space.
        options: of the query.
    """

    url: str
    protocol: str
    host: str
    folder: str
    options: dict[str, str] = field(default_factory=dict)


def parse(url: str, options: Collection[str] | None) -> Place:
    """Take `url` apart.

    Args:
        url: ``scheme://host/folder?option=value``.
        options: the known ones; None for any.

    Raises:
        ConfigError: it holds credentials, the host is missing, or an option is unknown or given twice.
    """
    shown = without_credentials(url)
    if shown != url:
        raise ConfigError(
            f"{shown}: credentials do not belong into a URL, which is logged and stored. Give them to the client "
            "library by environment variables or its own files; docs/storage.md lists them.",
            url=shown,
        )
    scheme, _, rest = url.partition("://")
    where, _, query = rest.partition("?")
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if options is not None and name not in options:
            raise ConfigError(
                f"{url}: unknown option {name!r}. Known for {scheme}://: {', '.join(sorted(options)) or 'none'}.",
                url=url,
            )
        if name in found:
            raise ConfigError(f"{url}: the option {name!r} is given twice", url=url)
        found[name] = value
    host, _, folder = where.partition("/")
    folder = folder.strip("/")
    if folder:
        check_key(folder)
    return Place(url, scheme.removeprefix("fsspec+"), host, folder, found)


def flag(place: Place, name: str) -> bool:
    """Whether the option `name` is switched on.

    Raises:
        ConfigError: its value is neither ``true`` nor ``false``.
    """
    value = place.options.get(name, "false")
    if value not in ("true", "false"):
        raise ConfigError(f"{place.url}: {name} is true or false, not {value!r}", url=place.url)
    return value == "true"
