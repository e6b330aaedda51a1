"""However a process ends with a save in flight: it is committed, or somebody is told, and the one before is whole.

Bug reports BR-26 and BR-27.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from manager.exit_jobs import Ask, Ended, Server, wait_until

import resilio
from resilio import CheckpointManager
from resilio.errors import LiveStateError, ResilioError
from resilio.state.plan import RestorePlan
from resilio.testing import worlds
from resilio.testing.worlds import run_world

INT, TERM = -signal.SIGINT, -signal.SIGTERM
LATE_S = 600.0  # a deadline that must not be waited for
SOON_S = 3.0
LOST = "the save in flight failed step=2"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


@pytest.fixture
def port() -> Iterator[int]:
    with worlds._store(60.0) as port:
        yield port


def committed(ask: Ask) -> int:
    """The newest step; every checkpoint that is there is whole and of its own values."""
    live = torch.zeros(5)
    steps = sorted(int(path.name[:9]) for path in Path(ask.folder, "run", "commits").iterdir())
    for step in steps:
        assert resilio.restore(ask.url, {"live": live, "rng": False}, which=step).step == step
        assert live.tolist() == [float(step)] * 5
    assert resilio.restore(ask.url, {"live": live, "rng": False}).step == steps[-1]
    assert steps[0] == 1
    return steps[-1]


def send(server: Server, ask: Ask, *signals: tuple[int, int, str]) -> Ended:
    """Run a job, and send each (signal, rank) once the file is there; at last the save is let go."""
    pids = server.begin(ask)
    try:
        for number, rank, file in signals:
            wait_until(ask.file(file).exists)
            os.kill(pids[rank], number)
        if ask.how.get("let_go"):
            wait_until(ask.file("held").exists)
            ask.file("held").unlink()
    except BaseException:
        server.kill(pids)  # or its end would be taken for that of the next job
        raise
    else:
        return server.end(ask, pids)
    finally:
        ask.file("held").unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize(("way", "status"), [("return", 0), ("exit", 3), ("raise", 1)])
@pytest.mark.parametrize("job", ["bare", "inside"])
def test_br_27_an_orderly_end_commits_the_save_in_flight(
    tmp_path: Any, server: Server, job: str, way: str, status: int
) -> None:
    """Even without `with` and `close`, where it is in flight while the interpreter is taken down."""
    ask = Ask(job, str(tmp_path), how={"way": way})
    ended = server.run(ask)
    assert (ended.status, committed(ask)) == (status, 2)
    assert LOST not in ended.said[0]
    assert not ended.said[0] or way == "raise"


@pytest.mark.parametrize("job", ["bare", "inside"])
def test_br_27_a_hard_end_leaves_the_one_before_and_the_next_restore_tells(
    tmp_path: Any, server: Server, job: str
) -> None:
    ask = Ask(job, str(tmp_path), how={"way": "hard"}, place="save.data_written")
    ask.how["wait"] = True
    assert server.run(ask).status == 0
    report = resilio.restore(ask.url, {"live": torch.zeros(5), "rng": False})
    assert [damage.facts["ref"].step for damage in report.unfinished] == [2]
    assert committed(ask) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_kill_by_sigterm_leaves_the_one_before(tmp_path: Any, server: Server, mode: str) -> None:
    ask = Ask("interrupted", str(tmp_path), how={"mode": mode}, place="save.data_written")
    assert send(server, ask, (signal.SIGTERM, 0, "held")).status == TERM
    assert committed(ask) == 1


@pytest.mark.parametrize("place", ["save.data_open", "save.part_written", "save.before_commit"])
def test_a_ctrl_c_inside_a_sync_save_ends_it_at_once(tmp_path: Any, server: Server, place: str) -> None:
    ask = Ask("interrupted", str(tmp_path), how={"mode": "sync"}, place=place)
    assert send(server, ask, (signal.SIGINT, 0, "held")).status == INT
    assert committed(ask) == 1


def test_a_ctrl_c_while_an_async_save_is_waited_for_lets_it_end(tmp_path: Any, server: Server) -> None:
    ask = Ask("interrupted", str(tmp_path), how={"mode": "async", "let_go": True})
    assert send(server, ask, (signal.SIGINT, 0, "waits")).status == INT
    assert committed(ask) == 2


def test_who_insists_on_a_ctrl_c_is_let_go_and_the_one_before_is_whole(tmp_path: Any, server: Server) -> None:
    ask = Ask("interrupted", str(tmp_path), how={"mode": "async"})
    insisting = ((signal.SIGINT, 0, "waits"), (signal.SIGINT, 0, "leaves"), (signal.SIGINT, 0, "ends"))
    assert send(server, ask, *insisting).status == INT
    assert committed(ask) == 1


@pytest.mark.parametrize(
    ("job", "how", "status"),
    [
        ("inside", {"way": "return"}, 1),
        ("inside", {"way": "raise"}, 1),
        ("inside", {"way": "exit"}, 3),
        ("bare", {"way": "return"}, 0),
        ("bare", {"way": "exit"}, 3),
        ("bare", {"way": "return", "drop": True}, 0),
    ],
)
def test_br_26_a_failure_that_nobody_looked_at_is_told(
    tmp_path: Any, server: Server, job: str, how: dict[str, Any], status: int
) -> None:
    ask = Ask(job, str(tmp_path), how={**how, "fail": True})
    ended = server.run(ask)
    assert (ended.status, committed(ask)) == (status, 1)
    assert "No space left on device" in ended.said[0]
    # Where `close` raised it there is a traceback; else one line that names the step.
    assert ended.said[0].count(LOST) == (0 if how == {"way": "return"} and job == "inside" else 1)


def test_a_failure_that_was_raised_is_not_told_again(tmp_path: Any, server: Server) -> None:
    ask = Ask("closed", str(tmp_path), how={"fail": True})
    ended = server.run(ask)
    assert (ended.status, ended.said) == (0, ["HEARD\n"])


def test_a_job_of_one_rank_that_destroys_its_group_first_still_commits(
    tmp_path: Any, server: Server, port: int
) -> None:
    ask = Ask("inside", str(tmp_path), port=port, how={"way": "destroy"})
    assert server.run(ask).status == 0
    assert committed(ask) == 2


# ---------------------------------------------------------------------------------------------------------- two ranks


@pytest.mark.parametrize("way", ["return", "exit"])
@pytest.mark.parametrize("store", ["outside", "on rank 0"])
def test_two_ranks_that_never_close_commit_their_save(
    tmp_path: Any, server: Server, port: int, way: str, store: str
) -> None:
    """With a vote under way on a group that nobody gives back, and a store that goes with rank 0."""
    how = {"way": way, "store": True}
    ask = Ask("bare", str(tmp_path), 2, 0 if store == "on rank 0" else port, how=how, timeout_s=LATE_S)
    ended = server.run(ask)
    assert (ended.statuses, committed(ask)) == ([3 if way == "exit" else 0] * 2, 2)


def test_a_failure_is_told_by_each_rank_that_nobody_closes(tmp_path: Any, server: Server, port: int) -> None:
    ask = Ask("bare", str(tmp_path), 2, port, how={"way": "return", "fail": True}, timeout_s=LATE_S)
    ended = server.run(ask)
    assert committed(ask) == 1
    assert all(LOST in said for said in ended.said)


def test_an_exception_on_one_rank_without_a_with_costs_no_save(tmp_path: Any, server: Server, port: int) -> None:
    ask = Ask("bare", str(tmp_path), 2, port, how={"way": "raise", "bad": 1}, timeout_s=LATE_S)
    assert server.run(ask).statuses == [0, 1]
    assert committed(ask) == 2


def test_leaving_by_an_exception_starts_no_collective(tmp_path: Any, server: Server, port: int) -> None:
    """Rank 1 is gone before rank 0 makes another call; the save in flight is committed, the next call tells."""
    ask = Ask("one_leaves", str(tmp_path), 2, port, timeout_s=LATE_S)
    ended = server.run(ask)
    assert (ended.statuses, committed(ask)) == ([1, 1], 2)
    assert "RanksLostError" in ended.said[0] and "rank 1 left (ValueError: my own mistake)" in ended.said[0]
    assert "ValueError: my own mistake" in ended.said[1] and "RanksLostError" not in ended.said[1]


@pytest.mark.parametrize("job", ["bare", "inside"])
def test_groups_that_are_destroyed_first_cost_the_save_at_most_and_not_without_a_word(
    tmp_path: Any, server: Server, port: int, job: str
) -> None:
    ask = Ask(job, str(tmp_path), 2, port, how={"way": "destroy"}, timeout_s=SOON_S)
    ended = server.run(ask)
    if committed(ask) == 1:
        assert all(LOST in said or "LostError: sav" in said or "SaveError" in said for said in ended.said), ended


def test_a_hard_end_of_one_rank_is_told_by_the_other(tmp_path: Any, server: Server, port: int) -> None:
    how = {"way": "hard", "bad": 1, "held": 1, "wait": True}
    ask = Ask("bare", str(tmp_path), 2, port, how=how, place="save.data_written", timeout_s=SOON_S)
    ended = server.run(ask)
    assert (ended.statuses, committed(ask)) == ([0, 0], 1)
    assert LOST in ended.said[0] and "rank(s) 1 did not come" in ended.said[0]


def test_a_kill_of_one_rank_by_sigterm_is_told_by_the_other(tmp_path: Any, server: Server, port: int) -> None:
    how = {"mode": "async", "held": 1}
    ask = Ask("interrupted", str(tmp_path), 2, port, how=how, place="save.data_written", timeout_s=SOON_S)
    ended = send(server, ask, (signal.SIGTERM, 1, "held"))
    assert (ended.statuses, committed(ask)) == ([1, TERM], 1)
    assert "rank(s) 1 did not come" in ended.said[0]


@pytest.mark.parametrize(
    ("hit", "held", "place", "meets", "step"),
    [
        pytest.param(0, 0, "save.data_open", "", 1, id="rank 0 writes"),
        pytest.param(1, 1, "save.data_open", "", 1, id="rank 1 writes"),
        pytest.param(0, 1, "save.data_open", "writing", 1, id="rank 0 waits for rank 1"),
        pytest.param(1, 0, "save.data_open", "writing", 1, id="rank 1 waits for rank 0"),
        pytest.param(0, 0, "save.before_commit", "", 1, id="rank 0 commits"),
        # Held there, rank 0 has read that rank 1 is in the meeting: told before, it would not begin to commit.
        pytest.param(1, 0, "save.before_commit", "", 2, id="rank 1 waits for the commit"),
    ],
)
def test_a_ctrl_c_on_one_rank_inside_a_sync_save_stays_one_and_the_other_is_told(
    tmp_path: Any, server: Server, port: int, hit: int, held: int, place: str, meets: str, step: int
) -> None:
    """DCP makes an ordinary failure of it and would wait for the other rank in a collective first."""
    how = {"mode": "sync", "held": held, "meets": meets, "let_go": hit != held}
    ask = Ask("interrupted", str(tmp_path), 2, port, how=how, place=place, timeout_s=LATE_S)
    ended = send(server, ask, (signal.SIGINT, hit, "meets" if meets else "held"))
    assert (ended.statuses[hit], ended.statuses[1 - hit], committed(ask)) == (INT, 1, step)
    assert re.search(rf"RanksLostError.*rank(\(s\))? {hit}.*KeyboardInterrupt", ended.said[1 - hit])


@pytest.mark.parametrize(("hit", "held"), [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_a_ctrl_c_on_one_rank_inside_a_restore_leaves_all_as_they_were(
    tmp_path: Any, server: Server, port: int, hit: int, held: int
) -> None:
    """And the next one of all ranks works."""
    how = {"held": held, "meets": "reading" if hit != held else "", "let_go": True}
    ask = Ask("restoring", str(tmp_path), 2, port, how=how, timeout_s=LATE_S)
    ended = send(server, ask, (signal.SIGINT, hit, "meets" if hit != held else "held"))
    assert ended.statuses == [0, 0], ended
    assert ended.said[hit] == "INTERRUPTED\n"
    assert re.match(rf"HEARD .*rank(\(s\))? {hit}.*KeyboardInterrupt", ended.said[1 - hit])


class Part:
    """State of a user's own, in the load of which a Ctrl-C comes when it is time."""

    def __init__(self, value: int, due: bool) -> None:
        self.value, self.due = value, due

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.due:
            self.due = False
            raise KeyboardInterrupt


def interrupted_in_a_load(rank: int, world: int, url: str) -> list[Any]:
    first, second, weight = Part(1, False), Part(1, False), torch.ones(2)
    state = {"first": first, "second": second, "weight": weight}
    said = []
    with CheckpointManager(url, state, mode="sync", timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        first.value = second.value = 2
        weight.fill_(2)
        second.due = rank == world - 1
        try:
            ckpt.restore()
        except ResilioError as error:
            said.append(f"{type(error).__name__} {error}")
        except KeyboardInterrupt:
            said.append("INTERRUPTED")
        said.append([first.value, second.value, *weight.tolist()])
        ckpt.save(2)  # as a job does that saves once more on a Ctrl-C
        ckpt.restore(1)
        return [*said, [first.value, second.value, *weight.tolist()]]


@pytest.mark.parametrize("world", [1, 2])
def test_a_ctrl_c_while_own_state_is_loaded_is_undone_on_all_ranks(tmp_path: Any, world: int) -> None:
    *others, hit = run_world(interrupted_in_a_load, world, f"file://{tmp_path}", init=world > 1)
    assert hit == ["INTERRUPTED", [2, 2, 2, 2], [1, 1, 1, 1]]
    for said, *values in others:
        assert said.startswith("RestoreError rank 1: second could not be restored") and "KeyboardInterrupt" in said
        assert values == hit[1:]


def test_a_ctrl_c_while_tensors_are_put_in_place_leaves_a_mixture_that_is_not_saved(
    tmp_path: Any, monkeypatch: Any
) -> None:
    live = {"a": torch.ones(2), "b": torch.ones(2)}
    apply = RestorePlan.apply

    def interrupted(self: RestorePlan, agree: Any = None) -> Any:
        def ctrl_c() -> None:
            raise KeyboardInterrupt

        self.stock.insert(1, ("b", ctrl_c))
        return apply(self, agree)

    with CheckpointManager(f"file://{tmp_path}", {"live": live, "more": torch.ones(2)}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        with monkeypatch.context() as patched:
            patched.setattr(RestorePlan, "apply", interrupted)
            with pytest.raises(LiveStateError, match=r"mixture.*KeyboardInterrupt"):
                ckpt.restore()
        with pytest.raises(LiveStateError, match="nothing is saved"):
            ckpt.save(2)
        ckpt.restore()
        ckpt.save(2)
