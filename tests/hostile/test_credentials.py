"""A secret in a URL, whatever it looks like and through whatever door it comes, is never written anywhere."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import resilio
from resilio import CheckpointManager, errors
from resilio.cli import main
from resilio.hooks import host
from resilio.ranks import portable
from resilio.storage import registry as registry_module
from resilio.storage.credentials import scrubbed, without_credentials

SECRETS = ("S3cr3tV4lue", "aa11/S3cr3tV4lue+b", "1234/S3cr3tV4lue", "%2FS3cr3tV4lue%3D")
NEEDLE = "S3cr3tV4lue"
URLS = (
    "{0}://user:{1}@host/run",
    "{0}://user:{1}@host.name:9000/run",
    "{0}://user:{1}@a:b@host/run",
    "{0}://user%3A{1}@host/run",
    "{0}://user:{1}%40host/run",
    "{0}:///user:{1}@host/run",
    "{0}://:{1}@host/run",
    "{0}://user:99999/{1}@host/run",
    "{0}://user:12#{1}@host/run",
    "{0}://user:12?{1}@host/run",
    "{0}://host/run?token={1}",
    "{0}://host/run?a=1&%74oken={1}",
    "{0}://host/run?sig={1}&a=1",
    "{0}://host/run?X-Amz-Signature={1}",
    "{0}://host/run?X-Amz-Credential={1}",
    "{0}://host/run?X-Amz-Security-Token={1}",
    "{0}://host/run?storage_options={{'key':'{1}'}}",
    "{0}://host/run?client_kwargs={1}",
    "{0}://host/run;AccountKey={1}",
    "{0}://host/run?sas={1}#x",
    "{0}://host/run?jwt={1}",
    "{0}://host/run?endpoint_url=http://user:{1}@other",
    "{0}://host/run?endpoint_url=http%3A%2F%2Fuser%3A{1}%40other",
    "{0}://host/run\0?token={1}",
    "{0}:/user:{1}@host/run",
    "{0}:user:{1}@host/run",
    "{0}//user:{1}@host/run",
    " {0}://user:{1}@host/run",
    "x{0}x://user:{1}@host/run ",
)
SCHEMES = ("s3", "S3", "gs", "abfs", "sftp", "fsspec+http", "chaos+s3", "quotes", "quotes-ours", "lacks", "nope")
ALL = [url.format(scheme, secret) for url in URLS for scheme in SCHEMES for secret in SECRETS]


def _quotes(url: str) -> Any:
    raise ValueError(f"cannot connect to {url}: authority {url.split('://')[-1].split('/')[0]!r}")


def _quotes_ours(url: str) -> Any:
    raise errors.AccessDeniedError(f"{url}: no", url=url)


def _lacks(url: str) -> Any:
    raise ImportError(f"no module for {url}")


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plugins that put the URL they are given into their errors."""
    schemes = host().storages.copy()
    for name, factory in (("quotes", _quotes), ("quotes-ours", _quotes_ours), ("lacks", _lacks)):
        schemes.register(name, factory, owner="plugin 'quotes'")
    monkeypatch.setattr(host(), "storages", schemes)
    yield


def told(call: Callable[[], Any]) -> str:
    """Everything that somebody may see of the error that `call` ends with, or of what it made."""
    try:
        made = call()
    except Exception as error:
        facts = repr(vars(error)) + repr(portable(error)) + repr(vars(portable(error)))
        return "".join(traceback.format_exception(error)) + str(error) + repr(error) + facts + repr(pickle.dumps(error))
    return repr(made) + repr(vars(made)) + str(pickle.dumps(made))


def test_constructing_restoring_and_opening_tell_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    live = {"model": torch.nn.Linear(1, 1)}
    with caplog.at_level(logging.DEBUG):
        for url in ALL:
            assert NEEDLE not in told(partial(resilio.open_storage, url)), url
        for url in ALL[:: len(SECRETS)]:
            assert NEEDLE not in told(partial(CheckpointManager, url, live)), url
            assert NEEDLE not in told(partial(resilio.restore, url, live)), url
    assert NEEDLE not in caplog.text


@pytest.mark.parametrize(
    "args", [("ls",), ("show",), ("verify",), ("doctor",), ("diff", "1"), ("pin", "1", "--because", "x")]
)
def test_no_command_tells_a_secret(args: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    name, *rest = args
    for number, url in enumerate(ALL[:: 8 * len(SECRETS) + 1]):
        more = (["--debug"], ["--json"], [])[number % 3]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
            main([name, url, *rest, *more])
        said = out.getvalue() + "".join(capfd.readouterr())
        assert NEEDLE not in said, (url, said)
        assert said.strip()


def test_what_is_shown_stays_as_it_is_when_it_is_shown_again() -> None:
    for url in ALL:
        shown = without_credentials(url)
        assert without_credentials(shown) == shown
        assert NEEDLE not in shown or "://" not in url


def test_a_run_whose_url_has_a_secret_looking_parameter_stores_none(tmp_path: Path) -> None:
    """`file://` is a name to the letter; what is written into its objects is looked through all the same."""
    live = {"model": torch.nn.Linear(1, 1)}
    for url in (f"file://{tmp_path}/a?token={NEEDLE}", f"file://{tmp_path}/u:{NEEDLE}@b"):
        with CheckpointManager(url, live, mode="sync") as ckpt:
            ckpt.save(1)
            assert NEEDLE not in repr(ckpt.checkpoints())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(NEEDLE.encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize("secret", ["S3cr3tV4lue", "a/S3cr3tV4lue", "%2FS3cr3tV4lue"])
def test_a_text_that_quotes_a_url_is_scrubbed_of_it(secret: str) -> None:
    from urllib.parse import unquote

    for url in (f"s3://user:{secret}@host/run", f"s3://host/run?token={secret}"):
        for quoted in (url, f"user:{secret}", f"'{secret}'", f"<{unquote(secret)}>", f"token {secret}"):
            assert NEEDLE not in scrubbed(f"cannot open {quoted}: refused", url)
    assert scrubbed("s3://host/run: refused", "s3://host/run") == "s3://host/run: refused"


def test_an_error_of_a_plugin_that_quotes_nothing_secret_comes_as_it_is() -> None:
    with pytest.raises(ValueError, match="cannot connect to quotes://host/run"):
        resilio.open_storage("quotes://host/run")
    with pytest.raises(errors.AccessDeniedError, match="quotes-ours://host/run: no"):
        resilio.open_storage("quotes-ours://u:S3cr3tV4lue@host/run")
    assert registry_module.without_credentials is without_credentials
