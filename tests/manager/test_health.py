"""A checkpoint whose values are not finite says so, and never costs the last one that training can go back to."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from workload import build

import resilio
from resilio import CheckpointManager, hookimpl, keep_healthy, keep_last, open_storage
from resilio.errors import ConfigError, IntegrityError, NoCheckpointError
from resilio.events import Event, Saved
from resilio.records import schema
from resilio.records.catalog import discover
from resilio.records.health import faults
from resilio.records.manifest import LoadedManifest, load_manifest
from resilio.records.quarantine import quarantine
from resilio.testing.worlds import run_world
from resilio.types import CheckpointRef


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.register_buffer("mask", torch.zeros(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model[1](model[0](torch.ones(5, 3))).sum().backward()
    optimizer.step()
    return model, optimizer


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "NOT HEALTHY" in record.getMessage()]


def manifest_of(url: Any, step: int) -> LoadedManifest:
    storage = open_storage(url)
    catalog = discover(storage)
    return load_manifest(storage, catalog.read(catalog.find(step)))


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[0] = math.nan


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ten_saves_of_a_model_that_went_to_nan_never_cost_the_last_healthy_one(tmp_path, caplog, mode):
    model, optimizer = make()
    before = model[0].weight.detach().clone()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, mode=mode, keep=keep_last(2)) as ckpt:
        for step in range(1, 4):
            ckpt.save(step).result()
        spoil(model)
        for step in range(4, 14):
            ckpt.save(step).result()
            assert 3 in [info.step for info in ckpt.checkpoints()]
        infos = ckpt.checkpoints()
        assert [(info.step, info.healthy, info.non_finite) for info in infos] == [
            (3, True, 0),
            (12, False, 4),
            (13, False, 4),
        ]
        reasons = {fate.ref.step: fate.why for fate in ckpt.explain().checkpoints}
        assert reasons[3] == "newest that is healthy"
    assert len(warned(caplog)) == 10
    assert "step 4" in warned(caplog)[0] and "4 value(s)" in warned(caplog)[0]
    assert "model.0.bias (1 NaN), model.0.weight (1 NaN)" in warned(caplog)[0]
    assert 'restore("healthy")' in warned(caplog)[0] and "keep_healthy" in warned(caplog)[0]
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, mode=mode) as ckpt:
        assert ckpt.restore(3).found.healthy
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("fingerprints", [True, False])
def test_what_is_a_fault_where(tmp_path, caplog, fingerprints):
    """An infinity in a mask may be meant; in what is trained and in the optimizer's state it is not. A NaN never is."""
    model, optimizer = make()
    state = optimizer.state[model[0].weight]
    said: dict[int, int | None] = {}
    with CheckpointManager(
        tmp_path, {"model": model, "optimizer": optimizer}, mode="sync", fingerprints=fingerprints
    ) as ckpt:
        with torch.no_grad():
            model.mask.fill_(-math.inf)
            ckpt.save(1)
            model[0].weight[1, 1] = math.inf
            ckpt.save(2)
            model[0].weight[1, 1] = 0.5
            state["exp_avg_sq"][0] = -math.inf
            ckpt.save(3)
            state["exp_avg_sq"].zero_()
            model.mask[0, 1] = math.nan
            ckpt.save(4)
        said = {info.step: info.non_finite for info in ckpt.checkpoints()}
    assert said == {1: 0, 2: 1, 3: 3, 4: 1}
    texts = warned(caplog)
    assert len(texts) == 3
    assert "model.0.weight (1 infinite)" in texts[0]
    assert "optimizer.state.0.weight.exp_avg_sq (3 infinite)" in texts[1]
    assert "model.mask (1 NaN)" in texts[2]
    assert [faults(manifest_of(tmp_path, step)) for step in range(1, 5)] == [
        {},
        {"model.0.weight": (0, 1)},
        {"optimizer.state.0.weight.exp_avg_sq": (0, 3)},
        {"model.mask": (1, 0)},
    ]
    assert manifest_of(tmp_path, 1).tensors["model.mask"].non_finite == (0, 4)
    assert manifest_of(tmp_path, 4).tensors["model.mask"].non_finite == (1, 3)
    assert manifest_of(tmp_path, 4).tensors["model.0.weight"].non_finite == (0, 0)


def test_a_state_without_an_optimizer_is_judged_by_its_nan_alone(tmp_path):
    model, _ = make()
    with CheckpointManager(tmp_path, {"model": model}, mode="sync") as ckpt, torch.no_grad():
        model[0].weight[0, 0] = math.inf
        ckpt.save(1)
        model[0].weight[0, 0] = math.nan
        ckpt.save(2)
        assert [info.healthy for info in ckpt.checkpoints()] == [True, False]


@pytest.mark.parametrize("size", [100, 300_000], ids=["beside", "in a thread"])
def test_large_and_small_ones_of_every_kind_are_counted(tmp_path, size):
    made = {
        "f32": torch.zeros(size),
        "bf16": torch.zeros(size, dtype=torch.bfloat16),
        "complex": torch.zeros(size, dtype=torch.complex64),
        "f8": torch.zeros(4 * size, dtype=torch.uint8).view(torch.float8_e5m2),
        "whole": torch.full((size,), -1, dtype=torch.int64),
    }
    for one in (made["f32"], made["bf16"], made["complex"]):
        one[7], one[-1] = math.nan, math.inf
    made["f8"].view(torch.uint8)[9] = 0x7C
    with CheckpointManager(tmp_path, {"mine": made}, mode="sync") as ckpt:
        ckpt.save(1)
        assert ckpt.checkpoints()[0].non_finite == 3
    found = {key: one.non_finite for key, one in manifest_of(tmp_path, 1).tensors.items() if key.startswith("mine")}
    assert found == {
        "mine.f32": (1, 1),
        "mine.bf16": (1, 1),
        "mine.complex": (1, 1),
        "mine.f8": (0, 1),
        "mine.whole": (0, 0),
    }


class Listens:
    def __init__(self) -> None:
        self.counts: list[int | None] = []

    @hookimpl
    def resilio_on_event(self, event: Event) -> None:
        if isinstance(event, Saved):
            self.counts.append(event.non_finite)


def test_the_event_of_a_save_has_the_count(tmp_path):
    model, _ = make()
    listens = Listens()
    with CheckpointManager(tmp_path, {"model": model}, mode="sync", plugins=[listens]) as ckpt:
        ckpt.save(1)
        spoil(model)
        ckpt.save(2)
    assert listens.counts == [0, 4]


def test_keep_healthy_alone_and_beside_another(tmp_path):
    model, optimizer = make()
    live = {"model": model, "optimizer": optimizer}
    for name, keep, lived in (
        ("alone", keep_healthy(2), [[1], [1, 2], [2, 3], [2, 3, 4], [2, 3, 5], [3, 6]]),
        ("both", keep_last(2) | keep_healthy(1), [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [5, 6]]),
    ):
        found = []
        with CheckpointManager(tmp_path / name, live, mode="sync", keep=keep) as ckpt:
            for step in range(1, 7):
                model.mask.fill_(math.nan if step in (4, 5) else 0.0)
                ckpt.save(step)
                found.append([info.step for info in ckpt.checkpoints()])
        assert found == lived


def counts(rank: int, world: int, url: str, kind: str) -> dict[str, Any]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("resilio").addHandler(handler)
    job = build(kind, rank, world)
    job.train_step()
    with torch.no_grad():
        for parameter in job.model.parameters():
            mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if mine.numel() > 1 and (isinstance(parameter, DTensor) or rank == 0):
                mine.view(-1)[0] = math.nan
                mine.view(-1)[1:2] = math.inf
    with CheckpointManager(url, {"model": job.model, "optimizer": job.optimizer}, mode="sync", timeout_s=60) as ckpt:
        ckpt.save(1)
        (info,) = ckpt.checkpoints()
    whole = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach()
        for name, one in job.model.named_parameters()
    }
    bad = {name: (int(one.isnan().sum()), int(one.isinf().sum())) for name, one in whole.items()}
    return {"non_finite": info.non_finite, "bad": bad, "said": [text for text in said if "NOT HEALTHY" in text]}


@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("fsdp2", 1), ("fsdp2", 2)])
def test_the_pieces_of_all_ranks_add_up(tmp_path, kind, world):
    first, *others = run_world(counts, world, f"file://{tmp_path}", kind)
    tensors = manifest_of(tmp_path, 1).tensors
    names = {f"model.{name}" for name in first["bad"]} & tensors.keys()
    assert {name: tensors[name].non_finite for name in names} == {
        name: first["bad"][name.removeprefix("model.")] for name in names
    }
    total = sum(map(sum, (first["bad"][name.removeprefix("model.")] for name in names)))
    assert first["non_finite"] == total > world * 10
    assert len(first["said"]) == 1 and f" {total} value(s)" in first["said"][0]
    assert all(one["said"] == [] and one["non_finite"] == total for one in others)


def lived(url: Any, faults: list[float]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A run that saved a step for each of these values in its mask, and its first weight made the step."""
    model, optimizer = make()
    with CheckpointManager(url, {"model": model, "optimizer": optimizer}, mode="sync") as ckpt:
        for step, value in enumerate(faults, 1):
            model.mask.fill_(value)
            with torch.no_grad():
                model[0].weight[0, 0] = step
            ckpt.save(step)
    return model, optimizer


def test_restore_of_the_healthy_goes_back_past_the_others_and_begins_a_branch(tmp_path, caplog):
    model, optimizer = lived(tmp_path, [0.0, 0.0, math.nan, math.nan])
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, mode="sync") as ckpt:
        caplog.clear()
        report = ckpt.restore("healthy")
        assert report.step == 2 and report.found.healthy and model[0].weight[0, 0] == 2
        assert "HEALTHY" not in str(report) + repr(report) and not warned(caplog)
        ckpt.save(ckpt.next_step)
        assert [(info.step, info.on_lineage) for info in ckpt.checkpoints()] == [
            (1, True), (2, True), (3, False), (4, False), (3, True)
        ]  # fmt: skip
    assert resilio.restore(tmp_path, {"model": model, "optimizer": optimizer}, which="healthy").step == 3


def test_restore_of_an_unhealthy_one_says_so_with_its_tensors(tmp_path, caplog):
    model, optimizer = lived(tmp_path, [0.0, math.nan])
    caplog.clear()
    report = resilio.restore(tmp_path, {"model": model, "optimizer": optimizer})
    assert report.step == 2
    assert "NOT HEALTHY: 4 value(s) of it are not finite" in str(report) and "NOT HEALTHY" in repr(report)
    (text,) = warned(caplog)
    assert "step 2" in text and "model.mask (4 NaN)" in text and 'restore("healthy")' in text


def test_a_damaged_healthy_one_is_passed_over_for_the_healthy_one_before(tmp_path, caplog):
    model, optimizer = lived(tmp_path, [0.0, math.nan, 0.0, math.nan])
    (data,) = tmp_path.glob("step-000000003-*/__0_0.distcp")
    data.write_bytes(b"")
    report = resilio.restore(tmp_path, {"model": model, "optimizer": optimizer}, "healthy")
    assert report.step == 1 and [one.facts["ref"].step for one in report.passed_over] == [3]
    (data,) = tmp_path.glob("step-000000001-*/__0_0.distcp")
    data.write_bytes(b"")
    with pytest.raises(IntegrityError, match=r"none of the 2 healthy checkpoint\(s\) of the lineage can be restored"):
        resilio.restore(tmp_path, {"model": model, "optimizer": optimizer}, "healthy")


def test_where_none_is_known_to_be_healthy_the_error_lists_them(tmp_path):
    model, optimizer = lived(tmp_path, [math.nan, math.nan])
    live = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, live, mode="sync") as ckpt:
        with pytest.raises(NoCheckpointError) as caught:
            ckpt.restore("healthy")
        assert "step 2 (generation 1): 4 are not finite\n  step 1 (generation 1): 4 are not finite" in str(caught.value)
        commit = tmp_path / "commits/000000001-g000001.json"
        record = json.loads(commit.read_bytes())
        del record["non_finite"], record["check"]  # as it was before there was a count
        commit.write_bytes(schema.seal(json.dumps(record).encode()))
        with pytest.raises(NoCheckpointError, match=r"step 1 \(generation 1\): its values were never counted"):
            ckpt.restore("healthy")
        assert ckpt.checkpoints()[0].healthy is None
        assert ckpt.restore(1).step == 1


def test_on_a_new_run_there_is_nothing_to_go_back_to_and_training_begins(tmp_path):
    model, optimizer = make()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, mode="sync") as ckpt:
        assert ckpt.restore("healthy").found is None
        ckpt.save(1)
        with pytest.raises(ConfigError, match="'healthy'"):
            ckpt.restore("healthiest")


def test_a_healthy_one_in_quarantine_is_passed_over_for_the_healthy_one_before(tmp_path):
    model, optimizer = lived(tmp_path, [0.0, math.nan, 0.0, math.nan])
    quarantine(open_storage(tmp_path), CheckpointRef(1, 3), "of a bad host")
    report = resilio.restore(tmp_path, {"model": model, "optimizer": optimizer}, "healthy")
    assert report.step == 1 and ["of a bad host" in one.what for one in report.passed_over] == [True]


@pytest.mark.parametrize(
    "names", [("model", "opt"), ("net", "optimizer"), ("net", "opt"), ("model", "d.adam")], ids=" ".join
)
def test_an_infinity_in_what_is_trained_is_a_fault_whatever_model_and_optimizer_are_called(tmp_path, names):
    model, optimizer = make()
    with torch.no_grad():
        model[0].weight[0, 0] = math.inf
        model.mask[0, 0] = -math.inf
        optimizer.state[model[0].bias]["exp_avg"][0] = math.inf
    first, _, second = names[1].partition(".")
    state = {names[0]: model, first: {second: optimizer} if second else optimizer}
    with CheckpointManager(tmp_path, state, mode="sync") as ckpt:
        ckpt.save(1)
        assert [info.non_finite for info in ckpt.checkpoints()] == [2]
    found = faults(manifest_of(tmp_path, 1))
    assert len(found) == 2 and all(counts == (0, 1) for counts in found.values()), found
