"""What plugins may do to a manager: keep more, find more, say more, and nothing else; on all ranks the same ones."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import resilio
import resilio.hooks
from resilio import CheckpointManager, failpoints, hookimpl, keep_last, open_storage
from resilio.errors import ConfigError, UnknownSchemeError
from resilio.events import Event, Swept, Verified
from resilio.hooks import SaveFacts
from resilio.policies import KeepPolicy
from resilio.records import keys, schema
from resilio.storage import LocalStorage, RegisterStorage, Storage
from resilio.testing.worlds import run_world
from resilio.types import CheckpointInfo, CheckpointRef, Damage

STATE = {"n": {"x": 1}}


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()
    resilio.hooks.host.cache_clear()


@dataclass
class Evals:
    """Keeps the steps it was told to."""

    steps: list[int] = field(default_factory=list)
    error: Exception | None = None
    seen: list[list[int]] = field(default_factory=list)
    heard: list[Event] = field(default_factory=list)

    @hookimpl
    def resilio_pins(self, checkpoints: list[CheckpointInfo]) -> dict[CheckpointRef, str]:
        self.seen.append([info.step for info in checkpoints])
        if self.error:
            raise self.error
        return {info.ref: "to be evaluated" for info in checkpoints if info.step in self.steps}

    @hookimpl
    def resilio_on_event(self, event: Event) -> None:
        self.heard.append(event)


def manager(where: Any, *plugins: object, **how: Any) -> CheckpointManager:
    """One that saves in step, for what happens after a save to have happened."""
    return CheckpointManager(where, STATE, plugins=plugins, **{"mode": "sync", "keep": keep_last(1), **how})


def steps(ckpt: CheckpointManager) -> list[int]:
    return [info.step for info in ckpt.checkpoints()]


# ---------------------------------------------------------------------------------------------------------------- pins


def test_what_a_plugin_names_lives_as_long_as_it_names_it(tmp_path: Path) -> None:
    evals = Evals([1, 2])
    with manager(f"file://{tmp_path}", evals) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3, 4):
            ckpt.save(step)
        assert steps(ckpt) == [1, 2, 4]
        assert evals.seen == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
        told = {fate.ref.step: (fate.goes, fate.why) for fate in ckpt.explain().checkpoints}
        assert told[1] == told[2] == (False, "to be evaluated (plugin Evals)")
        evals.steps = [2]
        assert [fate.ref.step for fate in ckpt.explain().checkpoints if fate.goes] == [1]
        ckpt.save(5)
        assert steps(ckpt) == [2, 5]


def test_what_the_branch_left_behind_is_kept_as_well(tmp_path: Path) -> None:
    """Seven days and two checkpoints later it would go."""
    old_s = 8 * 86_400.0

    class Later(LocalStorage):
        """All that is there was written 8 days before the newest commit."""

        def list(self, prefix: str) -> Any:
            found = list(super().list(prefix))
            newest = max((info.key for info in found if "g000002" in info.key), default="")
            return iter([replace(info, modified_s=2e9 - (0 if info.key == newest else old_s)) for info in found])

    with manager(f"file://{tmp_path}", keep=None) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            ckpt.save(step)
    evals = Evals([2])
    with manager(Later(tmp_path), evals, keep=None) as ckpt:
        ckpt.restore(1)
        for step in (4, 5, 6):
            ckpt.save(step)
        assert steps(ckpt) == [1, 2, 4, 5, 6]  # and not 3, which nobody named
        assert evals.seen[-1][0] == 2  # off the lineage first
        why = next(fate.why for fate in ckpt.explain().checkpoints if fate.ref.step == 2)
        assert re.fullmatch(r"off the lineage since generation 2, for 8 days; to be evaluated \(plugin Evals\)", why)


def test_a_plugin_s_reason_is_not_the_keep_policy_s(tmp_path: Path) -> None:
    """A policy that keeps nothing at all is a mistake, whatever a plugin keeps besides."""

    class Silent(KeepPolicy):
        def reasons(self, checkpoints: Any, now_s: float) -> dict[CheckpointRef, str]:
            return {}

    with manager(f"file://{tmp_path}", Evals([1]), keep=Silent()) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            ckpt.save(step)
        assert steps(ckpt) == [1, 2, 3]
        assert "the keep policy has no reason for any of 3" in str(ckpt.explain().refused)


@pytest.mark.parametrize("error", [ValueError("broken"), None])
def test_while_a_plugin_cannot_say_what_it_keeps_nothing_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Any
) -> None:
    class Rubbish(Evals):
        @hookimpl
        def resilio_pins(self, checkpoints: Any) -> Any:
            return super().resilio_pins(checkpoints) if self.error or self.steps else ["rubbish"]

    evals = Rubbish([1], error=error)
    url = f"file://{tmp_path}"
    with manager(url, keep=None) as ckpt:  # leaves an attempt without a record
        ckpt.restore()
        ckpt.save(1)
    for path in tmp_path.glob("commits/*"):
        path.unlink()
    with manager(url, evals) as ckpt, caplog.at_level(logging.WARNING, "resilio"):
        ckpt.restore()
        evals.steps = [] if error is None else [1]
        for step in (2, 3):
            ckpt.save(step)
        assert steps(ckpt) == [2, 3] and len(list(tmp_path.glob("step-*"))) == 3
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len([line for line in said if "'Rubbish'" in line and "nothing is deleted" in line]) == 2, said
        explained = ckpt.explain()
        assert "plugin 'Rubbish'" in str(explained.idle)
        assert not [fate for fate in explained.checkpoints + explained.leftovers if fate.goes]
        swept = [event for event in evals.heard if isinstance(event, Swept)]
        assert [(event.deleted, len(event.failed)) for event in swept] == [((), 1)] * 2
        evals.error, evals.steps = None, [3]
        ckpt.save(4)
        assert steps(ckpt) == [3, 4] and len(list(tmp_path.glob("step-*"))) == 2


def test_a_deletion_that_was_cut_off_is_not_forgotten_while_a_plugin_fails(tmp_path: Path) -> None:
    evals = Evals()
    with manager(f"file://{tmp_path}", evals) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        failed, committer = [], ckpt._committer
        delete = LocalStorage.delete

        def fails(self: Any, which: Any) -> None:
            which = list(which)
            if any(key.startswith("step-") for key in which):
                failed.append(which)
                raise resilio.errors.AccessDeniedError("no")
            delete(self, which)

        LocalStorage.delete = fails  # type: ignore[method-assign]
        try:
            ckpt.save(2)
        finally:
            LocalStorage.delete = delete  # type: ignore[method-assign]
        assert failed and committer.unfinished
        evals.error = ValueError("broken")
        ckpt.save(3)
        assert committer.unfinished
        evals.error = None
        ckpt.save(4)
        assert [path.name.split("-")[1] for path in tmp_path.glob("step-*")] == ["000000004"]


# -------------------------------------------------------------------------------------------------------------- verify


def test_what_plugins_find_is_damage_and_one_that_fails_is_inconclusive(tmp_path: Path) -> None:
    class Nan:
        @hookimpl
        def resilio_verify(self, checkpoint: CheckpointInfo, storage: Storage) -> list[Damage]:
            assert storage.exists(keys.attempt_key(checkpoint.attempt, keys.MANIFEST))
            return [Damage("n", "is nan")] if checkpoint.step == 1 else []

    class Broken:
        @hookimpl
        def resilio_verify(self) -> None:
            raise ValueError("broken")

    evals = Evals()
    with manager(f"file://{tmp_path}", Nan(), evals, keep=None) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2)
        assert ckpt.verify(2) == []
        (found,) = ckpt.verify(1)
        assert (str(found), found.facts) == ("n: is nan (plugin 'Nan')", {"plugin": "Nan"})
        assert [event.damage for event in evals.heard if isinstance(event, Verified)] == [(), (found,)]
    with manager(f"file://{tmp_path}", Broken()) as ckpt:
        (found,) = ckpt.verify(2)
        assert found.facts == {"inconclusive": True, "plugin": "Broken"}
        path = next(tmp_path.glob("commits/*2-g*"))
        path.write_bytes(path.read_bytes().replace(b"world", b"wordl"))
        assert len(ckpt.verify(2)) == 1  # what cannot be read at all is not asked about


# ------------------------------------------------------------------------------------------------------------ describe


class Tells:
    """What the loop's own variables say while it is asked."""

    def __init__(self) -> None:
        self.step = 0
        self.asked: list[SaveFacts] = []

    @hookimpl
    def resilio_describe(self, context: SaveFacts) -> dict[str, Any]:
        self.asked.append(context)
        return {"loop": self.step, "commit": "a1b2"}


def test_br_28_what_a_plugin_says_of_a_save_is_of_that_step_and_not_of_where_the_loop_is_when_it_ends(
    tmp_path: Path,
) -> None:
    hold, tells = tmp_path / "hold", Tells()
    failpoints.arm(f"save.data_open=hold:{hold}")
    with manager(f"file://{tmp_path}/run", tells, mode="async") as ckpt:
        ckpt.restore()
        tells.step = 1000
        handle = ckpt.save(1000, metrics={"loss": 0.5})
        tells.step = 1001
        while not hold.exists():
            pass
        hold.unlink()
        handle.result()
        (info,) = ckpt.checkpoints()
        assert info.about == {"Tells": {"loop": 1000, "commit": "a1b2"}}
    assert tells.asked == [SaveFacts(f"file://{tmp_path}/run", 1000, 1, {"loss": 0.5}, "asked for")]
    record = json.loads(next(tmp_path.glob("run/commits/*")).read_text())
    assert record["about"] == info.about


def test_a_record_of_before_there_were_plugins_reads_as_one_of_none(tmp_path: Path) -> None:
    with manager(f"file://{tmp_path}", Tells()) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        path = next(tmp_path.glob("commits/*"))
        old = json.loads(path.read_text())
        del old["about"], old["check"]
        path.write_bytes(schema.seal(json.dumps(old).encode()))
        (info,) = ckpt.checkpoints()
        assert info.about == {}


def says(rank: int, world: int, url: str) -> list[Any]:
    tells, evals = Tells(), Evals()
    with manager(url, tells, evals) as ckpt:
        ckpt.restore()
        ckpt.save(1, metrics={"loss": rank})
    return [tells.asked, evals.seen, steps(ckpt)]


def test_rank_0_alone_is_asked(tmp_path: Path) -> None:
    first, second = run_world(says, 2, f"file://{tmp_path}")
    assert [facts.world for facts in first[0]] == [2] and first[0][0].metrics == {"loss": 0.0}
    assert first[1] == [[1]] and first[2] == [1]
    assert second == [[], [], [1]]


# --------------------------------------------------------------------------------------------------------- a manager's


def test_a_manager_s_own_url_may_be_of_the_scheme_that_its_plugin_offers(tmp_path: Path) -> None:
    class Mine:
        @hookimpl
        def resilio_register_storage(self, register: RegisterStorage) -> None:
            register("mine", lambda url: LocalStorage(tmp_path))

    with manager("mine://run", Mine()) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    assert len(list(tmp_path.glob("commits/*"))) == 1
    with pytest.raises(UnknownSchemeError, match="no installed plugin offers storage for mine"):
        open_storage("mine://run")


@pytest.mark.parametrize("plugins", ["evals", None, Evals(), [Evals], [None], [object()]])
def test_what_is_no_plugin_is_refused_before_anything_is_done(tmp_path: Path, plugins: Any) -> None:
    with pytest.raises(ConfigError, match=r"plugins=\[MyDashboard\(\)\]|plugins=\[...\]"):
        CheckpointManager(f"file://{tmp_path}/run", STATE, plugins=plugins)
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------------- ranks

PLUGIN = """
import resilio

@resilio.hookimpl
def resilio_on_event(event):
    pass
"""


def has_others(rank: int, world: int, url: str, folder: str, how: str, call: str) -> str:
    sys.path.insert(0, folder)
    if how == "hooks":
        name = f"hooks_of_{rank}"
        os.environ["RESILIO_PLUGINS"] = "hooks_of"
        sys.path.insert(0, f"{folder}/{name}")
    elif how == "version":
        sys.path.insert(0, f"{folder}/version_{rank}")
    elif rank == (1 if how == "only" else 0):
        os.environ["RESILIO_PLUGINS"] = "watcher"
    if how in ("same", "disabled"):
        os.environ["RESILIO_PLUGINS"] = "watcher"
    if how == "disabled" and rank == 1:
        os.environ["RESILIO_DISABLE_PLUGINS"] = "watcher"
    resilio.hooks.host.cache_clear()
    try:
        if call == "restore":
            resilio.restore(url, {"n": {"x": 0}})
        else:
            CheckpointManager(url, STATE).close()
    except ConfigError as error:
        return str(error)
    except resilio.errors.NoCheckpointError:
        return "nothing to restore"
    return "made"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "watcher.py").write_text(PLUGIN)
    for rank in (0, 1):
        (tmp_path / f"hooks_of_{rank}").mkdir()
        more = "\n@resilio.hookimpl\ndef resilio_pins(checkpoints):\n    return {}\n" * rank
        (tmp_path / f"hooks_of_{rank}/hooks_of.py").write_text(PLUGIN + more)
        info = tmp_path / f"version_{rank}/watching-1.{rank}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: watching\nVersion: 1.{rank}\n")
        (info / "entry_points.txt").write_text("[resilio]\nwatch = watcher\n")
    return tmp_path


@pytest.mark.parametrize("call", ["manager", "restore"])
@pytest.mark.parametrize(
    ("how", "differs"),
    [
        ("only", "plugin 'watcher' is only here"),
        ("missing", "plugin 'watcher' is missing here"),
        ("disabled", "plugin 'watcher' is missing here"),
        ("version", "plugin 'watch' has version 1.1, on rank 0 1.0"),
        ("hooks", "plugin 'hooks_of' has hooks resilio_on_event, resilio_pins, on rank 0 resilio_on_event"),
    ],
)
def test_ranks_with_other_plugins_are_refused_and_named(
    tmp_path: Path, folder: Path, how: str, differs: str, call: str
) -> None:
    told = run_world(has_others, 2, f"file://{tmp_path}/run", str(folder), how, call)
    assert told[0] == told[1] and told[0].startswith(f"rank 1 has other plugins than rank 0: {differs}. Install")


@pytest.mark.parametrize(("call", "ends"), [("manager", "made"), ("restore", "nothing to restore")])
def test_ranks_with_the_same_plugins_go_on(tmp_path: Path, folder: Path, call: str, ends: str) -> None:
    assert run_world(has_others, 2, f"file://{tmp_path}/run", str(folder), "same", call) == [ends, ends]
