"""Client libraries' errors, translated into those of `resilio.errors`.

Told apart by class name, HTTP status and the store's own error code, so that no client library is imported here.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from typing import Any

from resilio.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    AuthExpiredError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    OutOfSpaceError,
    ResilioError,
    StorageError,
    ThrottledError,
    TransientError,
)

__all__ = ["HttpAnswerError", "says_exists", "translate"]

Kind = type[ResilioError]


class HttpAnswerError(Exception):
    """An answer that says no, of a store that we talk to by ourselves.

    Args:
        status: of HTTP; 0 for one of the answers within an answer.
        code: the store's own word for it, perhaps empty.
        text: for people, perhaps empty.
        codes: what those words mean.
    """

    def __init__(self, status: int, code: str, text: str, codes: Mapping[str, Kind] | None = None) -> None:
        super().__init__(f"{status} {code} {text}".strip())
        self.status, self.code, self.text, self.codes = status, code, text, codes or {}


# What an S3-like store answers. Codes that are not here go by the HTTP status.
S3_CODES: dict[str, Kind] = {
    "AccessDenied": AccessDeniedError,
    "AllAccessDisabled": AccessDeniedError,
    "InvalidAccessKeyId": AccessDeniedError,
    "SignatureDoesNotMatch": AccessDeniedError,
    "RequestTimeTooSkewed": AccessDeniedError,
    "ExpiredToken": AuthExpiredError,
    "ExpiredTokenException": AuthExpiredError,
    "TokenRefreshRequired": AuthExpiredError,
    "NoSuchKey": NotFoundError,
    "NoSuchUpload": NotFoundError,
    "NoSuchBucket": StorageError,  # not the same as "no such object": a run in it must not look new
    "PreconditionFailed": AlreadyExistsError,
    "ConditionalRequestConflict": TransientError,  # a race is still open: who comes back learns who won
    "OperationAborted": TransientError,
    "InvalidRange": IntegrityError,
    "SlowDown": ThrottledError,
    "Throttling": ThrottledError,
    "ThrottlingException": ThrottledError,
    "TooManyRequests": ThrottledError,
    "RequestLimitExceeded": ThrottledError,
    "ServiceUnavailable": TransientError,
    "InternalError": TransientError,
    "RequestTimeout": TransientError,
    "IncompleteBody": TransientError,
    "BadDigest": TransientError,  # what arrived is not what was sent
    "XAmzContentSHA256Mismatch": TransientError,
    "QuotaExceeded": OutOfSpaceError,
    "XMinioStorageFull": OutOfSpaceError,
    "EntityTooLarge": StorageError,
    "NotImplemented": StorageError,
}

AZURE_CODES: dict[str, Kind] = {
    "BlobAlreadyExists": AlreadyExistsError,
    "ConditionNotMet": AlreadyExistsError,
    "BlobNotFound": NotFoundError,
    "ContainerNotFound": StorageError,  # as NoSuchBucket
    "ContainerBeingDeleted": StorageError,
    "AuthenticationFailed": AccessDeniedError,
    "AuthorizationFailure": AccessDeniedError,
    "AuthorizationPermissionMismatch": AccessDeniedError,
    "InsufficientAccountPermissions": AccessDeniedError,
    "InvalidAuthenticationInfo": AuthExpiredError,
    "ServerBusy": ThrottledError,
    "OperationTimedOut": TransientError,
    "InternalError": TransientError,
    "InvalidRange": IntegrityError,
    "Md5Mismatch": TransientError,
}

HTTP_STATUS: dict[int, Kind] = {
    401: AuthExpiredError,
    403: AccessDeniedError,
    404: NotFoundError,
    408: TransientError,
    409: TransientError,
    412: AlreadyExistsError,
    416: IntegrityError,
    429: ThrottledError,
    501: StorageError,
    503: ThrottledError,
    507: OutOfSpaceError,
}

# By class name, the nearest in the order of inheritance first.
CLASSES: dict[str, Kind] = {
    # botocore
    "NoCredentialsError": AccessDeniedError,
    "PartialCredentialsError": AccessDeniedError,
    "CredentialRetrievalError": AuthExpiredError,
    "TokenRetrievalError": AuthExpiredError,
    "SSOTokenLoadError": AuthExpiredError,
    "UnauthorizedSSOTokenError": AuthExpiredError,
    "ProfileNotFound": ConfigError,
    "NoRegionError": ConfigError,
    "ParamValidationError": ConfigError,
    "HTTPClientError": TransientError,  # and below it everything that happens on the line
    "IncompleteReadError": TransientError,
    "ResponseParserError": TransientError,
    # google-auth, azure-core
    "DefaultCredentialsError": AccessDeniedError,
    "RefreshError": AuthExpiredError,
    "TransportError": TransientError,
    "ClientAuthenticationError": AuthExpiredError,
    "ServiceRequestError": TransientError,
    "ServiceResponseError": TransientError,
    # paramiko
    "BadHostKeyException": AccessDeniedError,
    "AuthenticationException": AccessDeniedError,
    "UnknownHostKeyError": AccessDeniedError,
    "NoValidConnectionsError": TransientError,
    "SSHException": TransientError,
    # aiohttp, requests, and what any client raises
    "ClientError": TransientError,
    "RequestException": TransientError,
    "FSTimeoutError": TransientError,
    "IncompleteRead": TransientError,
    "TimeoutError": TransientError,
    "CancelledError": TransientError,
    "ConnectionError": TransientError,
    "EOFError": TransientError,
    "gaierror": TransientError,
    "SSLError": TransientError,
    "FileNotFoundError": NotFoundError,
    "FileExistsError": AlreadyExistsError,
    "PermissionError": AccessDeniedError,
}

ERRNOS: dict[int | None, Kind] = {
    errno.ENOENT: NotFoundError,
    errno.EEXIST: AlreadyExistsError,
    errno.EACCES: AccessDeniedError,
    errno.EPERM: AccessDeniedError,
    errno.EROFS: AccessDeniedError,
    errno.ENOSPC: OutOfSpaceError,
    errno.EDQUOT: OutOfSpaceError,
    errno.EFBIG: OutOfSpaceError,
    errno.EBUSY: TransientError,
    errno.EAGAIN: TransientError,
    errno.ETIMEDOUT: TransientError,
    errno.EPIPE: TransientError,
    errno.EBADF: TransientError,  # closed under us, by `close` of another thread
    errno.ENETUNREACH: TransientError,
    errno.EHOSTUNREACH: TransientError,
}

WHAT_NEXT: dict[Kind, str] = {
    AccessDeniedError: "check credentials and permissions",
    AuthExpiredError: "renew the credentials",
    OutOfSpaceError: "free space or keep fewer checkpoints",
}

_CLOSED = re.compile(r"clos(ed|ing)|shut ?down|not connected|event loop", re.IGNORECASE)
_SECRETS = re.compile(
    r"(Bearer )\S+|((?:[\w-]*(?:key|token|secret|password|signature)|sig|upload_id)\s*[=:]\s*)[^\s&,;<'\"]+",
    re.IGNORECASE,
)


def translate(error: Exception, doing: str, *, key: str, url: str) -> ResilioError:
    """What `error` means.

    Args:
        error: a client library's.
        doing: the verb, as in "cannot put 'key'".
        key: of the object.
        url: of the storage.
    """
    kind, why = _kind(error)
    why = _SECRETS.sub(lambda found: f"{found[1] or found[2]}***", " ".join(why.split()))[:500]
    advice = f"; {WHAT_NEXT[kind]}" if kind in WHAT_NEXT else ""
    if kind is AlreadyExistsError:
        return AlreadyExistsError(f"{url}: there is an object {key!r} already", key=key, url=url)
    if kind is NotFoundError:
        return NotFoundError(f"{url}: no object {key!r}", key=key, url=url)
    return kind(f"{url}: cannot {doing} {key!r}: {why}{advice}", key=key, url=url)


def says_exists(error: Exception) -> bool:
    """Whether a create was refused because there is such an object."""
    return _kind(error)[0] is AlreadyExistsError


def _kind(error: Exception) -> tuple[Kind, str]:
    for one in _chain(error):
        if found := _of_answer(one):
            return found
    for one in _chain(error):
        for cls in type(one).__mro__:
            if cls.__name__ in CLASSES:
                return CLASSES[cls.__name__], _words(one)
    if isinstance(error, OSError) and error.errno in ERRNOS:
        return ERRNOS[error.errno], _words(error)
    if isinstance(error, RuntimeError | OSError) and _CLOSED.search(str(error)):
        return TransientError, _words(error)
    return StorageError, _words(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it: clients wrap the answer of the server."""
    one: BaseException | None = error
    for _ in range(5):
        if one is None:
            return
        yield one
        one = one.__cause__


def _of_answer(error: BaseException) -> tuple[Kind, str] | None:
    """What a server's answer means; None if the error holds none."""
    any_: Any = error
    response = getattr(any_, "response", None)
    status, code, text = 0, "", ""
    codes: Mapping[str, Kind] = {}
    if isinstance(error, HttpAnswerError):
        status, code, text, codes = error.status, error.code, error.text, error.codes
    elif isinstance(response, dict) and isinstance(response.get("Error"), dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code, text = str(response["Error"].get("Code", "")), str(response["Error"].get("Message", ""))
        codes = S3_CODES
    elif isinstance(getattr(any_, "status_code", None), int) and hasattr(any_, "error_code"):  # azure-core
        status, code, text = any_.status_code, str(any_.error_code or ""), str(getattr(any_, "reason", ""))
        codes = AZURE_CODES
    elif isinstance(getattr(any_, "code", None), int) and type(error).__name__ == "HttpError":  # gcsfs
        status, text = any_.code, str(error)
    else:
        return None
    status = status or (int(code) if code.isdigit() else 0)
    return codes.get(code) or _by_status(status), f"the store answered {status} {code}: {text}"


def _by_status(status: int) -> Kind:
    return HTTP_STATUS.get(status) or (TransientError if status >= 500 else StorageError)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
