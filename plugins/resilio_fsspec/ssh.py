"""How an SSH server is reached, and whether it is the right one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from .place import Place

__all__ = ["PASSWORD", "UnknownHostKeyError", "address", "connect"]

PASSWORD = "RESILIO_SFTP_PASSWORD"  # noqa: S105  the name of the environment variable

_CONNECT_S = 15


class UnknownHostKeyError(Exception):
    """The server shows a key that is not in the file of known hosts."""


def connect(place: Place) -> Any:
    """An SSH connection: as `ssh` itself would, by its agent, keys and configuration, and to known hosts only.

    Raises:
        UnknownHostKeyError: the server is not the one that it should be, or not known.
    """
    import paramiko

    user, host, port = address(place.host)
    ssh = paramiko.SSHConfig()
    with suppress(FileNotFoundError):
        ssh = paramiko.SSHConfig.from_path(str(Path("~/.ssh/config").expanduser()))
    asked = ssh.lookup(host)
    options = place.options
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(_known_hosts(options.get("known_hosts", "~/.ssh/known_hosts"), host))
    client.connect(
        asked["hostname"],
        int(port or asked.get("port", "22")),
        user or asked.get("user"),
        password=os.environ.get(PASSWORD),
        key_filename=options.get("identity") or asked.get("identityfile"),
        timeout=_CONNECT_S,
        banner_timeout=_CONNECT_S,
        auth_timeout=2 * _CONNECT_S,
    )
    return client


def address(host: str) -> tuple[str | None, str, str | None]:
    """``user@host:port``, taken apart."""
    user, _, rest = host.rpartition("@")
    name, _, port = rest.partition(":") if not rest.startswith("[") else (rest[1:].partition("]")[0], "", "")
    if rest.startswith("["):
        port = rest.partition("]")[2].removeprefix(":")
    return user or None, name, port or None


def _known_hosts(path: str, host: str) -> Any:
    """Refuses hosts that are not in the file at `path`; nothing is added to it."""
    import paramiko

    class KnownHosts(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # it has no types
        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            known = paramiko.HostKeys()
            with suppress(FileNotFoundError):
                known.load(str(Path(path).expanduser()))
            if not known.check(hostname, key):
                raise UnknownHostKeyError(
                    f"the host shows a {key.get_name()} key that {path} does not have for {hostname}; check it, then "
                    f"add it: ssh-keyscan {host} >> {path}"
                )

    return KnownHosts()
