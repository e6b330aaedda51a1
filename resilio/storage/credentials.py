"""URLs without the credentials in them: what may be shown, logged, put into an error, a record or a report."""

from __future__ import annotations

import re
from urllib.parse import unquote

__all__ = ["scrubbed", "without_credentials"]

_HIDDEN = "***"
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.%]*\]|[^:]*)(?::(?P<port>.*))?", re.IGNORECASE | re.DOTALL)
_PARAMETER = re.compile(r"([?&#;])([^=&;]*)=([^&#]*)")
_SECRET = re.compile(
    r"key|token|secret|passw|passphrase|pwd|cred|signature|auth|bearer|jwt|private|cookie|session|storage_options|kwargs"
    r"|headers|^sig$|^sas$|^pass$",
    re.IGNORECASE,
)
_INSIDE = re.compile(r"(://|%3A%2F%2F)(?:(?!%40)[^/?#&@])*(?:@|%40)", re.IGNORECASE)  # another URL in the middle


def without_credentials(url: str) -> str:
    """`url` as it may be shown: without ``user:password@`` and without the values of secret-looking parameters.

    In doubt more is left out: what follows a colon and is no port, or looks like one behind a name without a dot and
    has an ``@`` further on, may be a password.
    """
    scheme, sep, rest = url.partition("://")
    if not sep or scheme.lower() in ("file", "memory"):  # what follows is a name to the letter
        return url
    rest = _PARAMETER.sub(_hidden, _without_login(scheme.lower(), rest))
    return scheme + sep + _INSIDE.sub(r"\1", rest)


def scrubbed(text: str, url: str) -> str:
    """`text`, which may quote `url`, with nothing of its credentials."""
    shown = without_credentials(url)
    if shown == url:
        return text
    text = text.replace(url, shown)
    for secret in sorted(_secrets(url, shown), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def _without_login(scheme: str, rest: str) -> str:
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]  # of s3:///user:password@host, and it is no URL then
    rest = rest[len(slashes) :]
    authority = _authority(rest)
    if "@" in authority:
        user, _, host = authority.rpartition("@")
        # Elsewhere a bare user@ is a login or a container. What is before the last + or :: says how it is opened.
        if ":" in unquote(user) or re.split(r"\+|::", scheme)[-1] in ("http", "https"):
            return slashes + host + rest[len(authority) :]
        return slashes + rest
    found = _AUTHORITY.fullmatch(re.sub("%3a", ":", authority, flags=re.IGNORECASE))
    assert found is not None
    host, port = found["host"], found["port"]
    if port is None:
        return slashes + rest
    is_port = bool(re.fullmatch("0|[1-9][0-9]{0,4}", port) and int(port) < 1 << 16)
    decoded = rest.replace("%40", "@")
    if "@" in decoded and not (is_port and re.fullmatch(r"\[.*|localhost|.*\..*", host)):
        rest = decoded.partition("@")[2]  # a password with a slash in it, as AWS hands out
        return slashes + rest[_authority(rest).rfind("@") + 1 :]
    if is_port or not port:
        return slashes + rest
    return slashes + f"{host}:{_HIDDEN}" + rest[len(authority) :]  # a host was forgotten


def _authority(rest: str) -> str:
    return re.split(r"[/?#]", rest, maxsplit=1)[0]


def _hidden(found: re.Match[str]) -> str:
    value = unquote(found[3])
    if _SECRET.search(unquote(found[2])):
        shown = _HIDDEN
    else:
        shown = without_credentials(value)  # it may be a URL itself
    return found[0] if shown == value else f"{found[1]}{found[2]}={shown}"


def _secrets(url: str, shown: str) -> set[str]:
    """The texts that `shown` lacks, as they stand in `url` and as a client decodes them."""
    found = {value for _, _, value in _PARAMETER.findall(url)}
    for rest in re.split("://|%3A%2F%2F", url, flags=re.IGNORECASE)[1:]:
        login = re.match(r"/*(.*)(?:@|%40)", rest, re.IGNORECASE | re.DOTALL)
        if login:
            found |= {login[1], re.split(":|%3A", login[1], maxsplit=1, flags=re.IGNORECASE)[-1]}
    # Shorter ones would be found everywhere.
    return {one for raw in found for one in (raw, unquote(raw)) if len(one) >= 4 and one not in shown}
