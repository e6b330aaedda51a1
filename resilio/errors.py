"""Every error resilio raises, in one tree.

::

    ResilioError
    ├── ConfigError (ValueError)                 the call or the configuration cannot work
    ├── StorageError                             a backend's error, translated at the border
    │   ├── NotFoundError (FileNotFoundError)
    │   ├── AlreadyExistsError (FileExistsError) create-if-absent lost the race
    │   ├── AccessDeniedError (PermissionError)
    │   ├── AuthExpiredError (PermissionError)   credentials must be renewed; a rebuilt client may succeed
    │   ├── OutOfSpaceError (OSError)
    │   ├── ThrottledError                       retried
    │   ├── TransientError (ConnectionError)     retried
    │   └── UnknownSchemeError (ValueError)      no plugin offers this kind of URL
    ├── IntegrityError                           bytes are not the bytes that were saved
    ├── FormatError (ValueError)                 a record cannot be understood
    │   ├── NewerFormatError                     written by a newer resilio
    │   └── UnknownTypeError                     a value of a type that this process has not, or has otherwise
    ├── CaptureError (TypeError)                 a part of the live state cannot be saved exactly
    ├── RanksDisagreeError                       ranks hold different things where they must be equal
    ├── RanksLostError                           ranks did not come where all must meet: dead, or hung
    ├── SaveError                                an attempt failed; the checkpoints before it are untouched
    │   └── FencedError                          another manager owns the run now
    ├── RestoreError                             live state is as it was, unless the message says otherwise
    │   ├── NoCheckpointError (LookupError)
    │   ├── MismatchError (ValueError)           missing, unexpected, shape or dtype
    │   └── LiveStateError                       undo failed as well: the process must not go on
    └── InternalError                            a promise of ours is broken: please report it

A message says what happened, where, and what to do next. The facts a program needs are attributes. All pickle, so that
an error can cross ranks and processes.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccessDeniedError",
    "AlreadyExistsError",
    "AuthExpiredError",
    "CaptureError",
    "ConfigError",
    "FencedError",
    "FormatError",
    "IntegrityError",
    "InternalError",
    "LiveStateError",
    "MismatchError",
    "NewerFormatError",
    "NoCheckpointError",
    "NotFoundError",
    "OutOfSpaceError",
    "RanksDisagreeError",
    "RanksLostError",
    "ResilioError",
    "RestoreError",
    "SaveError",
    "StorageError",
    "ThrottledError",
    "TransientError",
    "UnknownSchemeError",
    "UnknownTypeError",
]


class ResilioError(Exception):
    """Base of all errors of resilio.

    Args:
        message: what happened, where, and what to do next.
        **facts: what a program may want to know; each becomes an attribute. They must pickle.
    """

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        # OSError twins would otherwise print in errno style.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.facts)


def _rebuild(cls: type[ResilioError], message: str, facts: dict[str, Any]) -> ResilioError:
    return cls(message, **facts)


class ConfigError(ResilioError, ValueError):
    """The call or the configuration cannot work; nothing was done."""


class StorageError(ResilioError):
    """A storage backend failed. Backends translate their own errors into this branch; `key` and `url` where known."""


class NotFoundError(StorageError, FileNotFoundError):
    """No object has this key."""


class AlreadyExistsError(StorageError, FileExistsError):
    """`put(if_absent=True)` found an object with this key."""


class AccessDeniedError(StorageError, PermissionError):
    """The store refuses this operation to these credentials. Not retried."""


class AuthExpiredError(StorageError, PermissionError):
    """The credentials ran out; a client built anew may succeed."""


class OutOfSpaceError(StorageError, OSError):
    """Disk or quota is full. Not retried."""


class ThrottledError(StorageError):
    """The store asks to slow down. Retried with backoff."""


class TransientError(StorageError, ConnectionError):
    """A fault that may pass: reset, timeout, 5xx. Retried with backoff."""


class UnknownSchemeError(StorageError, ValueError):
    """No installed plugin offers storage for this URL's scheme."""


class IntegrityError(ResilioError):
    """The bytes found are not the bytes that were saved: size or digest differs, or an object is missing."""


class FormatError(ResilioError, ValueError):
    """A record on storage cannot be understood or breaks a rule of the format."""


class NewerFormatError(FormatError):
    """Written by a newer resilio than this one; upgrade to read it."""


class UnknownTypeError(FormatError):
    """A value of a type that is not in `resilio.safe_types` here, or is another one here; `type` is its name.

    The checkpoint is whole, so no older one takes its place.
    """


class CaptureError(ResilioError, TypeError):
    """A part of the live state cannot be saved so that it comes back exactly. Names the part."""


class RanksDisagreeError(ResilioError):
    """Ranks hold different values or structure where they must be equal. Names key and ranks."""


class RanksLostError(ResilioError):
    """Some ranks did not come to where all must meet within the deadline. `ranks` names them, `phase` says where."""


class SaveError(ResilioError):
    """An attempt failed and is no checkpoint; the ones before it are untouched. Raised on all ranks."""


class FencedError(SaveError):
    """A newer generation owns the run: this manager must not write to it any more."""


class RestoreError(ResilioError):
    """A restore failed; live state is as it was."""


class NoCheckpointError(RestoreError, LookupError):
    """No checkpoint fits the request."""


class MismatchError(RestoreError, ValueError):
    """Checkpoint and live state differ in keys, shapes, dtypes or groups. Names them."""


class LiveStateError(RestoreError):
    """A restore failed and its undo failed too: live state is a mixture and the process must not train on."""


class InternalError(ResilioError):
    """A promise of resilio's own is broken. Please report it."""
