"""Values of registered types through a whole save and restore, and what becomes of them where they are unknown."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader

import resilio
from resilio import CheckpointManager, safe_types
from resilio.cli import main
from resilio.errors import CaptureError, UnknownTypeError
from resilio.records.quarantine import quarantined
from resilio.storage import LocalStorage

NAME = "tests.Phase"


class Phase(enum.Enum):
    WARMUP = 1
    DECAY = 2


@pytest.fixture(autouse=True)
def registered_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_types, "_by_name", dict(safe_types._by_name))
    monkeypatch.setattr(safe_types, "_by_type", dict(safe_types._by_type))


def state(phase: Any = Phase.WARMUP, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": nn.Linear(2, 2), "run": {"phase": phase, "n": 1, **more}}


def save(url: Path, live: dict[str, Any], *steps: int) -> None:
    wanted = dict(live["run"])
    with CheckpointManager(str(url), live, mode="sync") as ckpt:
        ckpt.restore()
        live["run"].update(wanted)
        for step in steps:
            ckpt.save(step)


def test_a_registered_enum_and_what_is_there_from_the_start_come_back(tmp_path: Path) -> None:
    safe_types.register(Phase, name=NAME)
    began = datetime.datetime(2026, 11, 30, tzinfo=datetime.timezone.utc)
    save(tmp_path, state(Phase.DECAY, began=began, to={Phase.WARMUP: torch.ones(2)}), 1)
    live = state(to={})
    resilio.restore(tmp_path, live)
    assert live["run"]["phase"] is Phase.DECAY and live["run"]["began"] == began
    assert torch.equal(live["run"]["to"][Phase.WARMUP], torch.ones(2))
    plain = {"run": {"began": None}}
    state_dict_loader.load(plain, checkpoint_id=next(tmp_path.glob("step-*")))
    assert plain["run"]["began"] == began


def test_a_type_nobody_registered_is_refused_at_the_save_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"run\.phase.*Phase.*safe_types\.register"):
        save(tmp_path, state(), 1)


def test_where_it_is_not_registered_the_restore_names_it_and_takes_no_older_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no damage: an older checkpoint would be the wrong one, without a word."""
    save(tmp_path, state(phase="old"), 1)
    safe_types.register(Phase, name=NAME)
    save(tmp_path, state(Phase.DECAY), 2)
    del safe_types._by_name[NAME], safe_types._by_type[Phase]
    live = state(phase="live")
    with torch.no_grad():
        live["model"].weight.fill_(7.0)
    with pytest.raises(UnknownTypeError, match=rf"run\.phase is of the type '{NAME}'"):
        resilio.restore(tmp_path, live)
    assert live["model"].weight.eq(7.0).all() and live["run"]["phase"] == "live"
    report = resilio.restore(tmp_path, live, exclude=["run"])
    assert report.step == 2 and live["run"] == {"phase": "live", "n": 1}
    assert torch.equal(live["model"].weight, state()["model"].weight)
    for command in (["show", str(tmp_path)], ["verify", str(tmp_path)], ["diff", str(tmp_path), "1", "2"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == (1 if command[0] == "diff" else 0)
    assert NAME in capsys.readouterr().out


@dataclasses.dataclass
class Config:
    lr: float
    warmup: int = 0


@dataclasses.dataclass
class OlderConfig:
    lr: float


@pytest.mark.parametrize("gone", ["a field", "a member", "a dtype"])
def test_a_type_that_is_another_one_here_is_no_damage(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was rolled back: an older checkpoint in place of a whole one would lose work."""
    save(tmp_path, state(phase="old"), 1)
    safe_types.register(Phase, name=NAME)
    safe_types.register(Config, name="tests.Config")
    saved = {"a field": Config(0.1, 3), "a member": Phase.DECAY, "a dtype": torch.float8_e8m0fnu}
    save(tmp_path, state(saved[gone]), 2)
    del safe_types._by_name[NAME], safe_types._by_name["tests.Config"]
    safe_types.register(enum.Enum("Other", ["WARMUP"], module=__name__), name=NAME)
    safe_types.register(OlderConfig, name="tests.Config")
    if gone == "a dtype":
        monkeypatch.delattr(torch, "float8_e8m0fnu")
    live = state(phase="live")
    with CheckpointManager(str(tmp_path), live) as ckpt:
        with pytest.raises(UnknownTypeError, match=r"run\.phase") as caught:
            ckpt.restore()
        assert caught.value.type and live["run"]["phase"] == "live"
        assert ckpt.restore(exclude=["run"]).step == 2
    assert not quarantined(LocalStorage(tmp_path))
