"""Which URL scheme is opened by whom."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from .. import errors
from ..errors import ConfigError, ResilioError, StorageError, UnknownSchemeError
from ..registry import Registry
from .base import Storage
from .credentials import scrubbed, without_credentials

__all__ = ["RegisterStorage", "StorageFactory", "StorageRegistry", "to_url", "without_credentials"]

StorageFactory = Callable[[str], Storage]

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_URL = re.compile(rf"(?P<scheme>{_SCHEME.pattern}):(?P<slashes>/*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_NO_COLON = re.compile(rf"(?P<scheme>{_SCHEME.pattern})//+(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
# What people mean by `s3//bucket`, whether a plugin for it is installed or not.
_FAMILIAR = ("file", "memory", "s3", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "http", "https", "sftp", "ssh")
_LOGIN = re.compile(r"[^/]*:.*@", re.DOTALL)  # the password may have slashes


_OURS: set[type[ResilioError]] = {
    one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, ResilioError)
}


class RegisterStorage(Protocol):
    """What a plugin is given to register its schemes with."""

    def __call__(self, scheme: str, factory: StorageFactory, *, hint: str = "") -> None:
        """Offer storage for ``scheme://…``.

        Args:
            scheme: lower case, without ``://``.
            factory: takes the URL as the user gave it, returns the storage. Must be cheap, and should import heavy
                libraries only when called; its storage's `url` must show no credentials.
            hint: what to do if the factory's libraries are missing: ``pip install 'resilio-ckpt[s3]'``.
        """


class _Offer(NamedTuple):
    factory: StorageFactory
    hint: str


class StorageRegistry(Registry[_Offer]):
    """Schemes and their factories. A scheme has one owner."""

    def __init__(self) -> None:
        super().__init__("storage for {}://", "no URL scheme: lower case, without ://", _SCHEME.pattern)

    def register(self, scheme: str, factory: StorageFactory, *, owner: str, hint: str = "") -> None:
        """Add a scheme.

        Raises:
            ConfigError: it is no scheme, the factory is none, or it has an owner already; both are named.
        """
        if not callable(factory) or not isinstance(hint, str):
            raise ConfigError(f"{owner} registers {scheme!r:.80}: give a function from URL to storage", owner=owner)
        self.add(scheme, _Offer(factory, hint), owner=owner)

    def schemes(self) -> dict[str, str]:
        """Each known scheme and its owner, sorted."""
        return self.owners()

    def open(self, url: str) -> Storage:
        """Open `url`, which has a scheme.

        Raises:
            UnknownSchemeError: nobody offers it, or the libraries for it are missing. Says what to install.
            ConfigError: the plugin's storage shows credentials in its `url`.
        """
        shown, scheme = without_credentials(url), url.partition("://")[0].lower()
        offer = self.get(scheme)
        if offer is None:
            raise UnknownSchemeError(
                f"{shown}: no installed plugin offers storage for {scheme}://. "
                f"Known: {', '.join(_short(self)) or 'none; is resilio-ckpt itself installed?'}. "
                f"Install a plugin that offers {scheme}://.",
                url=shown,
                scheme=scheme,
                known=tuple(self.schemes()),
            )
        try:
            storage = offer.factory(url)
        except Exception as error:
            said = str(error)
            clean = scrubbed(said, url)
            if not isinstance(error, ImportError) and clean == said:
                raise
            if not isinstance(error, ImportError):  # it shows the URL as it was given, credentials and all
                kind = next((one for one in _OURS if type(error) is one), StorageError)
                raise kind(f"{clean} ({type(error).__name__})", url=shown) from None
            raise UnknownSchemeError(
                f"{shown}: {self.owner(scheme)} offers {scheme}://, but a library is missing ({clean}). "
                f"{offer.hint or 'Install what that plugin needs.'}",
                url=shown,
                scheme=scheme,
                known=tuple(self.schemes()),
            ) from (error if clean == said else None)
        if without_credentials(storage.url) != storage.url:
            raise ConfigError(
                f"{shown}: the storage of {self.owner(scheme)} shows credentials in its url: report it there", url=shown
            )
        return storage


def _short(schemes: Iterable[str]) -> Iterable[str]:
    """`schemes` for people: of those that have a prefix such as ``fsspec+`` only that, each once."""
    return dict.fromkeys(prefix + ("+…" if plus else "") for prefix, plus, _ in (one.partition("+") for one in schemes))


def to_url(where: str | os.PathLike[str], schemes: Iterable[str] = ()) -> str:
    """`where` as a URL: a plain path becomes ``file://`` and the absolute path.

    A mistyped URL is no path: it would begin a new run in some folder here. What begins with ``./`` or ``../`` is one
    whatever it looks like.

    Args:
        where: a URL or a path.
        schemes: those that are known, for what lacks its colon.

    Raises:
        ConfigError: it is empty, has blanks around it, or looks like a URL with a broken beginning, as
            `pathlib.Path("s3://x")` has. Says what to write instead.
    """
    text = os.fspath(where) if isinstance(where, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        plain = where is None or isinstance(where, int | float)  # of other things the text may hold a password
        shown = repr(without_credentials(text)) if isinstance(text, str) else repr(where) if plain else type(where)
        raise ConfigError(f"a run is a URL or a path, not {shown}; write file:///data/run-17, or just /data/run-17")
    if isinstance(where, str) and text != text.strip():
        to_url(text.strip(), schemes)  # whatever else is wrong with it is said instead
        raise ConfigError(
            f"{without_credentials(text.strip())}: write it so, without the blanks or line ends around it; a folder "
            "whose name has some is given as a pathlib.Path"
        )
    if not text.startswith(("./", "../")):
        found = _URL.match(text)
        if found and len(found["slashes"]) >= 2:
            return found["scheme"].lower() + text[len(found["scheme"]) :]
        if found:
            raise _mistyped(found["scheme"], found["slashes"], found["rest"])
        found = _NO_COLON.match(text)
        if found and (found["scheme"].lower() in {*_FAMILIAR, *schemes} or _LOGIN.match(found["rest"])):
            raise _mistyped(found["scheme"], "", found["rest"])
        if "://" in text:
            raise ConfigError(
                f"{without_credentials(text)}: this is no URL, which begins with scheme:// and nothing before it, and "
                "no path has ://; to mean a folder all the same, write it with one slash and ./ before it"
            )
    text = os.path.expanduser(text)  # noqa: PTH111  pathlib would fold `a//b` and more
    return "file://" + os.path.abspath(text)  # noqa: PTH100  pathlib drops ".." only by following links


def _mistyped(scheme: str, slashes: str, rest: str) -> ConfigError:
    if scheme.lower() == "file":
        meant = "file://" + (os.path.abspath(slashes + rest) if rest else "/data/run-17")  # noqa: PTH100  as above
    else:
        meant = without_credentials(f"{scheme}://{rest}")
    return ConfigError(
        f"{meant}: write it so, as a string (pathlib drops a slash), or ./{scheme}… for a folder of that name"
    )
