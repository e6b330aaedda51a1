"""Checkpoints that are proven: full training state, any storage, any number of ranks.

The names below are the public API, together with `resilio.errors`, `resilio.events`, `resilio.types`,
`resilio.policies`, `resilio.storage`, `resilio.safe_types`, `resilio.testing` and `resilio.failpoints`. They are
resolved when first used: importing `resilio` imports neither torch nor a storage client, so the command and cheap tools
answer at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from . import events as events
    from . import safe_types as safe_types
    from .hooks import hookimpl as hookimpl
    from .hooks import open_storage as open_storage
    from .manager import CheckpointManager as CheckpointManager
    from .manager import RestoreReport as RestoreReport
    from .manager import SaveHandle as SaveHandle
    from .manager import restore as restore
    from .policies import keep_all as keep_all
    from .policies import keep_best as keep_best
    from .policies import keep_every as keep_every
    from .policies import keep_healthy as keep_healthy
    from .policies import keep_last as keep_last
    from .policies import keep_within as keep_within
    from .policies import save_at as save_at
    from .policies import save_every as save_every
    from .policies import save_on_signal as save_on_signal
    from .state.extras import per_rank as per_rank
    from .state.extras import replicated as replicated
    from .state.training_state import TrainingState as TrainingState

    __version__: str

__all__ = [
    "CheckpointManager",
    "RestoreReport",
    "SaveHandle",
    "TrainingState",
    "__version__",
    "errors",
    "events",
    "hookimpl",
    "keep_all",
    "keep_best",
    "keep_every",
    "keep_healthy",
    "keep_last",
    "keep_within",
    "open_storage",
    "per_rank",
    "replicated",
    "restore",
    "safe_types",
    "save_at",
    "save_every",
    "save_on_signal",
]

# Public name -> the module that has it. What is not here is a module of that name, or the version.
_HOME = {
    "CheckpointManager": ".manager",
    "RestoreReport": ".manager",
    "SaveHandle": ".manager",
    "TrainingState": ".state.training_state",
    "hookimpl": ".hooks",
    "keep_all": ".policies",
    "keep_best": ".policies",
    "keep_every": ".policies",
    "keep_healthy": ".policies",
    "keep_last": ".policies",
    "keep_within": ".policies",
    "open_storage": ".hooks",
    "per_rank": ".state.extras",
    "replicated": ".state.extras",
    "restore": ".manager",
    "save_at": ".policies",
    "save_every": ".policies",
    "save_on_signal": ".policies",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("resilio-ckpt")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name], __name__), name)
    elif name in __all__:
        value = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
