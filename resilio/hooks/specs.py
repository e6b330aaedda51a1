"""The hooks a plugin may implement. None of them can delete, veto a save or change bytes.

A plugin is a module, or any object, with functions marked by `hookimpl`. Each may leave out arguments it does not need.
No hook may call a collective: most run on rank 0 alone, and the other ranks would wait. So `step`, `save`, `restore`
and `close` of a manager raise `ConfigError` in a hook of it.

Plugins are called one after the other, in the order of `Host.plugins`, each whatever became of those before it.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pluggy

from ..events import Event
from ..policies import PolicyFactory
from ..storage import RegisterStorage, Storage
from ..types import CheckpointInfo, CheckpointRef, Damage, Scalar

__all__ = [
    "HOOKS",
    "PROJECT",
    "Commands",
    "RegisterDrill",
    "RegisterPolicy",
    "SaveFacts",
    "Scalar",
    "hookimpl",
    "hookspec",
    "resilio_add_commands",
    "resilio_describe",
    "resilio_on_event",
    "resilio_pins",
    "resilio_register_drills",
    "resilio_register_policies",
    "resilio_register_storage",
    "resilio_verify",
]

PROJECT = "resilio"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RegisterPolicy(Protocol):
    """What a plugin is given to register its policies with."""

    def __call__(self, name: str, make: PolicyFactory) -> None:
        """Let `name` be read from text: ``resilio forget --keep "keep_prime(3)"``, plan files.

        Args:
            name: as the policy prints itself, for example ``keep_prime``.
            make: takes numbers and strings, returns the policy; raises `ConfigError` or `TypeError` for wrong ones.
        """


class RegisterDrill(Protocol):
    """What a plugin is given to register what can be drilled."""

    def __call__(self, name: str, factory: str) -> None:
        """Let `name` stand for a workload that a drill restores into.

        Args:
            name: lower case letters, digits, ``-``.
            factory: where it lies, ``package.module:function``. It is imported in the drill's own processes only.
        """


class Commands(Protocol):
    """What a plugin is given to add its commands to."""

    def __call__(self, name: str, where: str, *, help: str = "") -> None:
        """Add ``resilio <name>``.

        Args:
            name: lower case letters, digits, ``-``.
            where: a function with typer's annotations, or a `typer.Typer` with subcommands, as
                ``package.module:object``. It is imported when the command runs, or its help is asked for. What the
                function returns is the exit code (None: 0).
            help: one line for ``resilio --help``.
        """


@dataclass(frozen=True)
class SaveFacts:
    """What a save is about, when it begins.

    Attributes:
        url: the run's store, without credentials.
        step: optimizer steps completed.
        world: number of ranks.
        metrics: rank 0's.
        reason: why it is saved.
    """

    url: str
    step: int
    world: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@hookspec
def resilio_register_storage(register: RegisterStorage) -> None:
    """Offer storage for one or more URL schemes.

    Called when the plugin is loaded: once per process, when the first URL is opened or the command starts; of one given
    to a manager, when that is made. A plugin is a module with an entry point in the group ``resilio``; it should import
    its libraries in the factory, not at its top, because every process that opens any storage imports it::

        # pyproject.toml:  [project.entry-points.resilio]
        #                  mystore = "my_store"
        import resilio

        @resilio.hookimpl
        def resilio_register_storage(register):
            register("mystore", open_my_store, hint="pip install my-store[client]")

        def open_my_store(url):
            from .client import MyStorage    # a resilio.storage.Storage that passes resilio.testing.StorageContract
            return MyStorage(url)

    A scheme has one owner: a second one is an error that names both.

    Args:
        register: call it with the scheme and a factory, see `resilio.storage.RegisterStorage`.

    Ranks: any; not collective.
    """


@hookspec
def resilio_register_policies(register: RegisterPolicy) -> None:
    """Offer policies that can be read from text, in the command and in plan files.

    Called when the plugin is loaded. A name has one owner: a second one is an error that names both. In a program no
    hook is needed: pass the policy to `CheckpointManager`.

    Args:
        register: call it with the name and what makes the policy.

    Ranks: any; not collective.
    """


@hookspec
def resilio_register_drills(register: RegisterDrill) -> None:
    """Offer workloads that restore drills can train.

    Called when the plugin is loaded. A name has one owner: a second one is an error that names both.

    Args:
        register: call it with the name and where the workload's factory lies.

    Ranks: any; not collective.
    """


@hookspec
def resilio_add_commands(commands: Commands) -> None:
    """Add commands to ``resilio``.

    Called when the plugin is loaded. A name has one owner, and resilio's own commands keep theirs: a second one is an
    error that names both.

    Args:
        commands: call it with the name and where the command lies.

    Ranks: none; in the command.
    """


@hookspec
def resilio_pins(checkpoints: Sequence[CheckpointInfo]) -> Mapping[CheckpointRef, str]:
    """Name checkpoints that must be kept, whatever the keep policy says.

    Called before each sweep, and by `explain`, `resilio plan` and `resilio forget`. It is asked again each time, so
    what it names no more is the policy's again. If it raises, or returns something else, nothing is deleted in that
    sweep: what it would have kept is not known.

    Args:
        checkpoints: all of the run, off the lineage first, then oldest to newest; a copy of your own.

    Returns:
        Checkpoint -> why, for people: one line of up to 200 characters. Nothing to keep is an empty mapping.

    Ranks: rank 0, in the saving thread. Blocks: the next save, so be quick.
    """


@hookspec
def resilio_verify(checkpoint: CheckpointInfo, storage: Storage) -> Iterable[Damage]:
    """Look at a checkpoint for more than its digests tell.

    Called after its bytes were compared with their digests, by `CheckpointManager.verify` and ``resilio verify``. If it
    raises, the checkpoint is not called intact: that is a finding of its own, with the fact ``inconclusive``, besides
    those it had come to. Every finding names its plugin, also in the fact ``plugin``.

    Args:
        checkpoint: which.
        storage: the run's, for reading: whatever would change it raises `ConfigError`.

    Returns:
        What is wrong; nothing if all is well. It may be a generator.

    Ranks: any; not collective.
    """


@hookspec
def resilio_describe(context: SaveFacts) -> Mapping[str, Scalar]:
    """Say something about a save that goes into its commit record: the commit of the code, the job's id, the queue.

    Called when the save begins, so that it tells of that step and not of the one the loop is at when the save ends.
    What it returns is stored under the plugin's name and shown by ``resilio show``. If it raises, or returns too much
    (more than 64 entries, 128 characters in a name, 4096 in a value, 32 KiB in all) or something else, that is logged
    and left out. So is what comes after 256 KiB of other plugins.

    Args:
        context: of the save; a copy of your own.

    Returns:
        Name -> value; JSON's plain values only. None: nothing.

    Ranks: rank 0, in the loop's thread. Blocks: the loop, so be quick.
    """


@hookspec
def resilio_on_event(event: Event) -> None:
    """Hear what happened: for metrics, dashboards, alerts.

    If it raises, that is logged and nothing else happens: once as a warning for each kind of event, and again each
    100th time. It may be called from the loop's thread or the saving thread, never from two at once for one manager. It
    may ask the manager whatever is not collective.

    Args:
        event: one of `resilio.events`; kinds that you do not know may come, ignore them.

    Ranks: rank 0. Blocks: whoever called, so be quick: hand over to a thread of your own what takes longer.
    """


# In the order of docs/hooks.md.
HOOKS: tuple[Any, ...] = (
    resilio_register_storage,
    resilio_register_policies,
    resilio_register_drills,
    resilio_add_commands,
    resilio_pins,
    resilio_verify,
    resilio_describe,
    resilio_on_event,
)
