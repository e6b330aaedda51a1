"""Bad input and bad places: the message says what, where and what to do; nothing is lost, nothing half applied."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import pickle
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from records.fake_store import edited
from records.fake_store import forged as resealed
from torch import nn
from workload import assert_same, build, rng, snapshot

import resilio
from resilio import CheckpointManager, keep_all, keep_last, open_storage, save_every
from resilio.errors import (
    CaptureError,
    ConfigError,
    FencedError,
    FormatError,
    IntegrityError,
    MismatchError,
    NewerFormatError,
    NoCheckpointError,
    ResilioError,
    SaveError,
    StorageError,
    UnknownSchemeError,
)
from resilio.policies import KeepPolicy
from resilio.records.digests import digest_of
from resilio.testing.worlds import run_world


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Nothing here is large enough for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


STATE = {"n": {"x": 1}}


def steps_of(url: str) -> list[int]:
    with CheckpointManager(url, STATE) as ckpt:
        return [info.step for info in ckpt.checkpoints() if not ckpt.verify(info.step)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad_input") / "run"
    job = build("single")
    with CheckpointManager(path, job.state(), mode="sync") as ckpt:
        for step in (1, 2):
            job.train_step()
            ckpt.save(step)
    return path


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> str:
    """A run with steps 1 and 2, of the job of `workload`."""
    shutil.copytree(saved, tmp_path / "run")
    return f"file://{tmp_path}/run"


def refuses(url: Any, error: type[BaseException] | tuple[type[BaseException], ...], match: str, **how: Any) -> str:
    """A manager and a reader both refuse to restore, and a job of another seed stays bit for bit as it was."""
    said = []
    for begin in (
        lambda state: CheckpointManager(url, state).restore(**how),
        lambda state: resilio.restore(url, state, **how),
    ):
        job = build("single", seed=5)
        job.train_step()
        before = snapshot(job), rng()
        with pytest.raises(error, match=match) as caught:
            begin(job.state())
        assert_same((snapshot(job), rng()), before)
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0]


# ----------------------------------------------------------------------------------------------- how it is to be done


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"fresh": "no"}, "fresh='no': it is True or False"),
        ({"progress": "yes"}, "progress='yes': it is True, False or None"),
        ({"timeout_s": 0}, "timeout_s=0: give seconds"),
        ({"timeout_s": float("inf")}, "timeout_s=inf: give seconds"),
        ({"timeout_s": "60"}, "timeout_s='60': give seconds"),
        ({"keep": "keep_last(3)"}, "keep='keep_last.*resilio.policies.parse_keep reads one from text"),
        ({"save": 500}, "save=500: this is a policy, such as save_every"),
    ],
    ids=str,
)
def test_arguments_that_would_not_do_what_they_seem_to_say_are_refused(tmp_path, arguments, match):
    with pytest.raises(ConfigError, match=match):
        CheckpointManager(f"file://{tmp_path}/run", STATE, **arguments)
    assert not list(tmp_path.iterdir())


class Mine(KeepPolicy):
    """A policy of the user's own, without a repr."""

    def __init__(self, n: int) -> None:
        self.n = n

    def reasons(self, checkpoints: Any, now_s: float) -> dict[Any, str]:
        return {info.ref: "mine" for info in checkpoints[-self.n :]}


def keeps_otherwise(rank: int, world: int, url: str) -> str:
    with CheckpointManager(url, STATE, keep=Mine(2), mode="sync"):
        pass  # each rank's own object prints another address, which makes it no other policy
    with pytest.raises(ConfigError) as caught:
        CheckpointManager(url, STATE, keep=[keep_last(1), keep_all()][rank])
    with pytest.raises(ConfigError, match="timeout_s=0"):
        CheckpointManager(url, STATE, timeout_s=[60, 0][rank])
    return str(caught.value)


def test_ranks_that_keep_otherwise_are_told_so(tmp_path):
    said = run_world(keeps_otherwise, 2, f"file://{tmp_path}")
    assert said[0] == said[1]
    assert "rank 1 was given other arguments" in said[0] and "keep_all()" in said[0]


# ------------------------------------------------------------------------------------------------------- where it lies


@pytest.mark.parametrize(
    ("url", "error", "match"),
    [
        ("", ConfigError, "a URL or a path, not ''; write file:///"),
        (None, ConfigError, "a URL or a path, not None; write file:///"),
        (17, ConfigError, "a URL or a path, not 17"),
        (b"/data", ConfigError, "a URL or a path, not <class 'bytes'>"),
        (["/data"], ConfigError, "a URL or a path"),
        ("/data/a\0b", ConfigError, "a URL or a path"),
        ("file://data/run", ConfigError, "file:///absolute/path, with three slashes"),
        ("memory://", ConfigError, "memory:// needs a name"),
        ("s3:/bucket/run", ConfigError, "s3://bucket/run: write it so"),
        (pathlib.Path("s3://bucket/run"), ConfigError, "pathlib drops a slash"),
        (
            "nope://user:secret@host/run",
            UnknownSchemeError,
            "nope://host/run: no installed plugin.*Known: .*file, .*memory",
        ),
    ],
    ids=str,
)
def test_what_is_no_run_is_refused_before_anything_else(url, error, match):
    assert "secret" not in refuses(url, error, match)


@pytest.mark.parametrize("below", ["", "/run", "/a/b"])
def test_a_path_at_or_below_a_plain_file_is_an_error_and_no_new_run(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    url = f"file://{tmp_path}/file{below}"
    refuses(url, StorageError, "no folder and cannot become one")
    with CheckpointManager(url, STATE, mode="sync") as ckpt, pytest.raises(SaveError, match=f"{url}.*is a file"):
        ckpt.save(1)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("root", "why"), [("/proc/resilio", "cannot be made here"), ("/sys/resilio", "permitted|read-only|denied")]
)
def test_a_folder_that_cannot_be_written_fails_the_save_and_says_where(root, why, mode):
    live = {"x": 1}
    ckpt = CheckpointManager(f"file://{root}", {"n": live}, mode=mode)
    assert ckpt.restore().found is None
    with pytest.raises(SaveError, match=f"file://{root}: cannot create 'step-000000001-.*({why})"):
        ckpt.save(1).result()
    if mode == "async":
        with pytest.raises(SaveError, match=root):
            ckpt.close()
    ckpt.close()
    assert live == {"x": 1}


# --------------------------------------------------------------------------------------------------------- no more room


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_fails_the_save_leaves_the_old_checkpoint_and_the_next_save_works(small_disk, mode):
    url = f"file://{small_disk}/run"
    live = torch.zeros(100_000)  # 400 kB
    with CheckpointManager(url, {"live": live}, mode=mode) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        hog = small_disk / "hog"
        hog.write_bytes(bytes(1_400_000))
        live += 1
        with pytest.raises(SaveError, match=r"no room to save step 2.* are free\. Free space or keep fewer") as caught:
            ckpt.save(2)
        assert caught.value.cause == "OutOfSpaceError"
        assert caught.value.errno == errno.ENOSPC
        assert live.eq(1).all()
        assert [info.step for info in ckpt.checkpoints()] == [1]
        assert ckpt.verify(1) == []
        hog.unlink()
        ckpt.save(2).result()  # the same step, a new attempt
        live += 1
        ckpt.restore()
        assert live.eq(1).all()
        assert len([*(small_disk / "run").glob("step-*")]) == 2
    assert steps_of(url) == [1, 2]


def test_a_limit_on_the_size_of_files_is_no_space_as_well(tmp_path):
    url = f"file://{tmp_path}/run"
    live = torch.zeros(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointManager(url, {"live": live}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            with pytest.raises(SaveError, match=r"ulimit -f") as caught:
                ckpt.save(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.cause == "OutOfSpaceError"
        ckpt.save(2)
    assert steps_of(url) == [1, 2]


# ----------------------------------------------------------------------------------------------- records from outside


class Forged:
    """A checkpoint whose records somebody edited, with all digests made right again."""

    def __init__(self, url: str, step: int = 2) -> None:
        self.root = Path(url.removeprefix("file://"))
        (self.commit_path,) = self.root.glob(f"commits/{step:09d}-*")
        self.commit = json.loads(self.commit_path.read_bytes())
        self.folder = self.root / self.commit["attempt"]
        self.manifest = json.loads((self.folder / "manifest.json").read_bytes())
        self.part = json.loads((self.folder / "manifest-0.json").read_bytes())

    def objects(self, name: str, data: bytes) -> None:
        """Replace an object, and what the records say of it."""
        replace(self.folder / name, data)
        for record in (*self.manifest["objects"], *self.part["objects"]):
            if record["name"] == name:
                record.update(size_bytes=len(data), digest=digest_of(data))

    def seal(self) -> None:
        part = json.dumps(self.part).encode()
        replace(self.folder / "manifest-0.json", part)
        self.manifest["parts"][0].update(size_bytes=len(part), digest=digest_of(part))
        root = json.dumps(self.manifest).encode()
        replace(self.folder / "manifest.json", root)
        self.commit.update(manifest_size_bytes=len(root), manifest_digest=digest_of(root))
        self.seal_commit()

    def seal_commit(self) -> None:
        replace(self.commit_path, resealed(self.commit))


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def test_a_forger_who_changes_nothing_is_not_noticed(run):
    """The forgeries below fail for what they change, not for how it is done."""
    Forged(run).seal()
    job = build("single", seed=5)
    assert resilio.restore(run, job.state()).step == 2


OUTSIDE = ["../outside", "/etc", "step-000000002-g000001-00/../../outside", "..", "", "step-000000002-g000001-0000\n"]


@pytest.mark.parametrize("attempt", OUTSIDE)
def test_a_commit_record_that_points_outside_of_the_run_is_refused(run, tmp_path, attempt):
    forged = Forged(run)
    (tmp_path / "outside").mkdir()
    for path in forged.folder.iterdir():
        (tmp_path / "outside" / path.name).write_bytes(path.read_bytes())
    forged.commit["attempt"] = attempt
    forged.seal_commit()
    refuses(run, FormatError, r"commits/000000002-g000001\.json", which=2)
    assert refused_then_older(run) == 1


def refused_then_older(url: str) -> int:
    """What a restore takes instead, with a word on what it passed over."""
    job = build("single", seed=5)
    report = resilio.restore(url, job.state())
    assert "step 2" in str(report.passed_over[0])
    return report.step


def test_a_commit_record_that_points_to_another_checkpoint_s_folder_is_refused(run):
    forged, other = Forged(run, 2), Forged(run, 1)
    forged.commit.update({key: other.commit[key] for key in ("attempt", "manifest_size_bytes", "manifest_digest")})
    forged.seal_commit()
    refuses(run, FormatError, r"commits/000000002-g000001\.json", which=2)
    assert refused_then_older(run) == 1


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../../outside", ".."])
@pytest.mark.parametrize("of", ["data", "metadata", "part"])
def test_a_manifest_that_names_an_object_outside_of_its_folder_is_refused(run, tmp_path, of, name):
    forged = Forged(run)
    (tmp_path / "outside").write_bytes((forged.folder / "__0_0.distcp").read_bytes())
    records = {"data": forged.part["objects"], "metadata": forged.manifest["objects"], "part": forged.manifest["parts"]}
    records[of][0]["name"] = name
    forged.seal()
    match = {
        "data": r"manifest-0\.json: objects are not data objects",
        "metadata": re.escape(f"manifest.json names the object {name!r}, which does not lie in its own folder"),
        "part": re.escape(name),
    }
    refuses(run, FormatError, match[of], which=2)


@pytest.mark.parametrize("where", ["resilio.json", "commit", "generation", "manifest", "part"])
def test_a_record_of_a_newer_format_is_no_damage_and_says_what_to_do(run, where):
    """Any of them: neither passed over for an older checkpoint, nor written to."""
    forged = Forged(run)
    if where in ("manifest", "part"):
        getattr(forged, where)["format"] = 2
        forged.seal()
    else:
        name = {"resilio.json": "resilio.json", "generation": "generations/000001.json"}.get(where)
        path = forged.root / name if name else forged.commit_path
        replace(path, edited(path.read_bytes(), b'"format":1', b'"format":2'))
    listed = sorted(path.relative_to(forged.root) for path in forged.root.rglob("*"))
    refuses(run, NewerFormatError, "has format 2; this resilio reads up to 1. Upgrade")
    with CheckpointManager(run, build("single").state(), mode="sync") as ckpt, pytest.raises(ResilioError):
        ckpt.save(3)
    assert sorted(path.relative_to(forged.root) for path in forged.root.rglob("*")) == listed


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("sealed", [True, False], ids=["digests-made-right", "digests-left"])
def test_a_payload_in_the_pickled_metadata_is_not_run(run, tmp_path, sealed):
    marker = tmp_path / "ran"
    forged = Forged(run)
    forged.objects(".metadata", pickle.dumps(Payload(f"touch {marker}")))
    if sealed:
        forged.seal()
        job = build("single", seed=5)
        assert resilio.restore(run, job.state()).step == 2  # everything comes from the manifest
    else:
        refuses(run, IntegrityError, r"\.metadata", which=2)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(f"touch {marker}")))
    assert marker.exists()


# ------------------------------------------------------------------------------------------------------ state


class Loads:
    """Has state, and takes it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = state_dict


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (None, "a TrainingState or a mapping from names, not NoneType"),
        ([1], "a TrainingState or a mapping from names, not list"),
        (nn.Linear(1, 1), "a TrainingState or a mapping from names, not Linear"),
        ({1: 2}, "a TrainingState or a mapping from names, not dict"),
        ({"a.b": 1}, "'a.b' cannot name a part.*a name has no dots"),
        ({"step": 1}, "'step' cannot name a part.*taken"),
        ({"model": {"x": 1}}, "model must be a torch module or a dict of them"),
        ({"scheduler": object()}, "scheduler has no state_dict and load_state_dict: object. Leave it out"),
        ({"model": {"a.b": nn.Linear(1, 1)}}, "'a.b' cannot name one of several; use text without dots"),
        ({"scheduler": {1: Loads()}}, "1 cannot name one of several"),
        ({"rng": torch.Generator()}, "rng is True or False"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:20],
)
def test_state_that_is_none_is_refused_and_nothing_is_made(tmp_path, state, match):
    for begin in (CheckpointManager, resilio.restore):
        with pytest.raises(ConfigError, match=match):
            begin(f"file://{tmp_path}/run", state)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_part_that_cannot_be_saved_fails_the_save_by_name_and_training_may_go_on_without_it(tmp_path, mode):
    url = f"file://{tmp_path}/run"
    job = build("single")
    mine: dict[str, Any] = {"fine": 1, "deep": [{"er": object()}]}
    with CheckpointManager(url, {**job.state(), "mine": mine}, mode=mode) as ckpt:
        ckpt.restore()
        before = snapshot(job), rng()
        with pytest.raises(CaptureError, match=r"mine\.deep\.0\.er.*builtins\.object.*leave it out"):
            ckpt.save(1)
        assert_same((snapshot(job), rng()), before)
        assert list(open_storage(url).list("")) == []
        del mine["deep"]
        ckpt.save(1)
    assert steps_of(url) == [1]


def test_a_model_that_no_longer_matches_is_one_error_that_names_it_all(run):
    job = build("single", seed=5)
    net = job.model
    net.extra = nn.Linear(2, 2)  # missing in the checkpoint
    del net.gain  # only there
    net.norm.weight = nn.Parameter(torch.ones(8))  # another shape
    net.blocks[0].up.to(torch.bfloat16)  # another dtype
    before = {name: value.clone() for name, value in net.state_dict().items()}, rng()
    with CheckpointManager(run, {"model": net}, mode="sync") as ckpt:
        with pytest.raises(MismatchError, match="nothing was changed") as caught:
            ckpt.restore(exclude=["optimizer", "scheduler", "dataloader"])
        error = caught.value
        assert sorted(error.missing) == ["model.extra.bias", "model.extra.weight"]
        assert error.unexpected == ["model.gain"]
        assert error.shapes == {"model.norm.weight": "saved [9], live [8]"}
        assert error.dtypes == dict.fromkeys(
            ["model.blocks.0.up.weight", "model.blocks.0.up.bias"], "saved float32, live bfloat16"
        )
        for named in (*error.missing, *error.unexpected, *error.shapes, *error.dtypes):
            assert named in str(error)
        for way in ("exclude=", "strict=False", "rename=", "nothing is cast"):
            assert way in str(error)
        assert_same(({name: value.clone() for name, value in net.state_dict().items()}, rng()), before)
        with pytest.raises(FencedError, match=r"restore\(\)"):  # nor is it saved over what it could not take
            ckpt.save(3)
    assert steps_of(run) == [1, 2]


# -------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mode": "turbo"}, "mode='turbo': there are 'sync' and 'async'"),
        ({"digest": "md5"}, "digest='md5': there are 'xxh3_128', 'crc32', 'sha256'"),
        ({"digest": None}, "digest=None"),
        ({"timeout_s": 0}, "timeout_s=0: give seconds, more than 0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": "1h"}, "timeout_s='1h'"),
    ],
)
def test_what_a_manager_cannot_work_with_is_refused_when_it_is_made(tmp_path, arguments, match):
    with pytest.raises(ConfigError, match=match):
        CheckpointManager(f"file://{tmp_path}/run", STATE, **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [True, 1.0, -1, "1", None, np.int64(3), torch.tensor(3), 10**9, 2**70], ids=repr)
def test_a_step_is_a_whole_number_of_the_plain_kind(tmp_path, step):
    url = f"file://{tmp_path}"
    with CheckpointManager(url, STATE, save=save_every(1)) as ckpt:
        ckpt.restore()
        for save in (ckpt.save, ckpt.step):
            with pytest.raises(ConfigError, match=r"an int from 0 on|is not within 0 and 999999999") as caught:
                save(step)
            assert str(step) in str(caught.value)
        assert list(open_storage(url).list("")) == []
        ckpt.step(1)
    assert steps_of(url) == [1]


@pytest.mark.parametrize(
    ("metrics", "match"),
    [
        ({"loss": "0.5"}, r"metrics\['loss'\] is str; it must be a number or a tensor of one element"),
        ({"loss": b"1"}, "is bytes"),
        ({"loss": [0.5]}, "is list"),
        ({"loss": None}, "is NoneType"),
        ({"loss": torch.ones(2)}, "is Tensor"),
        ({"loss": torch.tensor(1j)}, "is Tensor"),
        ({"loss": 10**400}, "is int"),
        (0.5, "metrics=0.5: give a mapping"),
        ([("loss", 1)], "give a mapping"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_metrics_that_are_no_numbers_are_refused_and_nothing_is_written(tmp_path, metrics, match, mode):
    url = f"file://{tmp_path}"
    with CheckpointManager(url, STATE, save=save_every(2), mode=mode) as ckpt:
        ckpt.restore()
        ckpt.step(1, metrics=metrics)  # read only when a save needs them
        for save in (ckpt.step, ckpt.save):
            with pytest.raises(ConfigError, match=match):
                save(2, metrics=metrics)
        assert list(open_storage(url).list("")) == []
        ckpt.save(2, metrics={"loss": torch.tensor([0.5]), "n": np.float32(2), "odd": float("nan"), "on": True})
    (info,) = ckpt.checkpoints()
    assert {**info.metrics, "odd": 0} == {"loss": 0.5, "n": 2.0, "odd": 0, "on": 1.0}


@pytest.mark.parametrize("which", [True, 2.0, None, "", "latest", "2", b"newest", [2], np.int64(2)], ids=repr)
def test_which_is_newest_or_the_number_of_a_step(run, which):
    refuses(
        run,
        ConfigError,
        re.escape(f"restore(which={which!r}): which is 'newest', 'healthy', the number of a step, or the ref"),
        which=which,
    )


def test_a_step_that_cannot_be_is_not_found(run):
    refuses(run, NoCheckpointError, "no checkpoint of step -1; newest steps: 1, 2", which=-1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"only": 3}, "only=3: give names of components or patterns"),
        ({"only": [3]}, r"only=\[3\]: give names"),
        ({"exclude": [None]}, r"exclude=\[None\]: give names"),
        ({"exclude": b"model"}, "exclude=b'model': give names"),
        ({"rename": 3}, "rename=3: give a mapping of name prefixes, saved to live, or a function"),
        ({"rename": {"a": 3}}, "rename={'a': 3}: give a mapping"),
        pytest.param({"rename": lambda key: None}, "rename gave None for", id="rename gave None"),
        ({"rename": {"model.blocks.0": "model.blocks.1"}}, "rename maps both"),
        ({"only": ["models"]}, "only='models' matches nothing; the checkpoint has model"),
        ({"exclude": ["scheduler", "modle"]}, "exclude='modle' matches nothing; the checkpoint has model"),
        ({"strict": "no"}, "strict='no': it is True or False"),
    ],
    ids=str,
)
def test_what_a_restore_cannot_work_with_is_refused_by_name(run, arguments, match):
    refuses(run, ConfigError, match, **arguments)


def asks_otherwise(rank: int, world: int, url: str) -> list[str]:
    live = {"x": rank}
    said = []
    with CheckpointManager(url, {"n": live}, timeout_s=20) as ckpt:
        for mine in (
            [{}, {"which": 2}],
            [{"only": ["n"]}, {}],
            [{}, {"strict": False}],
            [{"exclude": 3}, {}],
            [{}, {"rename": 3}],
        ):
            with pytest.raises(ConfigError) as caught:
                ckpt.restore(**mine[rank])
            said.append(str(caught.value))
            assert live == {"x": rank}
        # The same, said in another way: no difference.
        ckpt.restore(only=iter(["n", "rng"]) if rank else {"rng", "n"})
    for mode in ("sync", "async"):
        with pytest.raises(ConfigError) as caught:
            CheckpointManager(url, {"n": live}, digest="md5" if rank else "crc32", mode=mode, timeout_s=20)
        said.append(str(caught.value))
    return said


def test_ranks_that_ask_for_different_things_are_told_so_and_nobody_waits(tmp_path):
    url = f"file://{tmp_path}"
    with CheckpointManager(url, STATE) as ckpt:
        ckpt.save(1)
    first, second = run_world(asks_otherwise, 2, url, timeout_s=60)
    assert first == second
    assert all("rank 1 was given other arguments than rank 0: which=" in text for text in first[:3])
    assert "rank 0: exclude=3" in first[3] and "rank 1: rename=3" in first[4]
    assert all("rank 1: digest='md5'" in text for text in first[5:])


# ------------------------------------------------------------------------------------------ after the end, two at once


CALLS: dict[str, Callable[[CheckpointManager], Any]] = {
    "step": lambda ckpt: ckpt.step(2),
    "save": lambda ckpt: ckpt.save(2),
    "restore": lambda ckpt: ckpt.restore(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_manager_says_so_and_closing_again_is_nothing(tmp_path, call):
    url = f"file://{tmp_path}"
    with CheckpointManager(url, STATE, save=save_every(1)) as ckpt:
        ckpt.save(1)
        ckpt.close()
        ckpt.close()
        with pytest.raises(ConfigError, match="is closed; make a new one"):
            CALLS[call](ckpt)
    ckpt.close()
    with ckpt, pytest.raises(ConfigError, match="is closed"):
        CALLS[call](ckpt)
    assert [info.step for info in ckpt.checkpoints()] == [1]  # looking is not collective, and still works


def test_of_two_managers_the_older_is_fenced_and_ls_shows_both_branches(tmp_path, capfd):
    from resilio.cli import main

    url = f"file://{tmp_path}/run"
    old = CheckpointManager(url, STATE, mode="sync")
    old.restore()
    old.save(1)
    old.save(2)
    new = CheckpointManager(url, STATE, mode="sync")
    new.restore(1)
    new.save(2)
    with pytest.raises(FencedError, match="generation 2") as caught:
        old.save(3)
    assert not caught.value.stored
    new.save(3)
    for ckpt in (old, new):
        ckpt.close()
    with pytest.raises(SystemExit) as ended:
        main(["ls", url])
    assert ended.value.code == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert "lineage" in rows[0]
    shown = [(row[0], row[1], "off" if "off" in row else "on") for row in rows[1:]]
    assert shown == [("3", "2", "on"), ("2", "2", "on"), ("2", "1", "off"), ("1", "1", "on")]


def test_a_run_record_that_cannot_be_read_costs_no_checkpoint(run):
    """It says nothing about them. What is written here would go by it, so nothing is."""
    replace(Forged(run).root / "resilio.json", b"{")
    job = build("single", seed=5)
    with CheckpointManager(run, job.state(), mode="sync") as ckpt:
        assert ckpt.restore().step == 2
        with pytest.raises(FormatError, match=r"resilio\.json is not a readable RunRecord"):
            ckpt.save(3)
    assert [info.step for info in ckpt.checkpoints()] == [1, 2]


def test_a_generation_record_that_is_no_json_is_named(run):
    replace(Forged(run).root / "generations" / "000001.json", b"\0not json")
    refuses(run, FormatError, r"generations/000001\.json is not a readable GenerationRecord")
