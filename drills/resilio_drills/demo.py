"""What resilio promises, seen once: train on 2 ranks, be killed inside a save, resume on 1 rank, and lose nothing.

    python -m resilio_drills.demo            everything goes to .demo/ in the current folder

1. Two ranks train (torchrun, FSDP2, compiled) and save in the background. A failpoint holds one save open just before
   its commit: all data is on storage, and it is still no checkpoint.
2. While training goes on, SIGKILL to the whole job: launcher and ranks. Nobody can clean up or say goodbye.
3. One rank without FSDP goes on from the last checkpoint that was committed, to the end.
4. `resilio ls` and `resilio verify --all` look at what is there.
5. The judgement: every step of a run that nobody killed must have been trained on exactly its samples. Both lives wrote
   down what they trained on; that is compared with what the seed says.

The exit code is 0 only if all of it came out as promised.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from resilio_drills.data import GlobalSampler, corpus, windows
from resilio_drills.train import Config

__all__ = ["main"]

SIZES = Config(n_layer=2, n_head=2, n_embd=64, block_size=64, global_batch=12, steps=80, save_every=10)
HELD_SAVE = 4  # the save that is held open: so three are committed before it
OVERRUN = 3  # steps that training must get ahead while that save is open
LOSS_RTOL = 1e-4  # between the losses of 2 and 1 ranks on the same steps; seen: 1e-6. An optimizer not restored: 2e-1

START_S = 240.0  # until the first life is in the held save: imports and a cold compiler, on a busy machine
END_S = 180.0  # for the second life
LOOK_S = 60.0  # for `ls` and `verify`


class DemoError(Exception):
    """The demo could not come to its end, or something was not as promised."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if all promises were kept."""
    parser = argparse.ArgumentParser(
        prog="python -m resilio_drills.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="emptied first (default: .demo)")
    folder = parser.parse_args(argv).dir.resolve()
    demo = Demo(folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the children then, too
    try:
        empty(folder)
        print(demo.run())
    except DemoError as error:
        print(f"\nDEMO FAILED: {error}", flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        demo.end_all()
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The story


class Demo:
    """One run of the demo, with all that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder / 'run'}"
        self.began_s = time.monotonic()
        # Every process of ours inherits this and can be found by it, whatever session it put itself into.
        self.mark = f"RESILIO_DEMO={uuid.uuid4().hex}"
        self.readers: dict[int, threading.Thread] = {}

    def run(self) -> str:
        """Play it. Returns the closing line."""
        hold = self.folder / "save-held-open"
        held_step = HELD_SAVE * SIZES.save_every

        self.heading(f"train on 2 ranks: FSDP2, compiled, a save every {SIZES.save_every} steps in the background")
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        first = self.start(
            [*ranks, *self.training("life-1"), "--strategy", "fsdp2"],
            RESILIO_FAILPOINTS=f"save.before_commit=hold:{hold}#{HELD_SAVE}",
        )
        self.wait(first, START_S, f"the save of step {held_step} to be held open", hold.exists)
        self.heading(f"the save of step {held_step} is held open just before its commit; training goes on meanwhile")
        self.wait(first, START_S, "training to get ahead", lambda: self.trained("life-1") >= held_step + OVERRUN)

        self.heading("SIGKILL to launcher and ranks")
        self.end_all()
        first.wait()
        killed_at = self.trained("life-1")

        self.heading("resume on 1 rank, without FSDP")
        second = self.start([*self.training("life-2"), "--strategy", "single"])
        self.wait(second, END_S, "the second life to end")

        self.heading("look at what is there")
        for command in ("ls", self.url), ("verify", self.url, "--all"):
            print(f"  $ resilio {' '.join(command)}", flush=True)
            look = self.start(["-m", "resilio", *command])
            self.wait(look, LOOK_S, f"`resilio {command[0]}`")

        self.heading("the judgement")
        return judge(self.steps("life-1"), self.steps("life-2"), killed_at, held_step - SIZES.save_every)

    def training(self, life: str) -> list[str]:
        """Arguments of `python` for one life."""
        flags = ["n-layer", "n-head", "n-embd", "block-size", "global-batch", "steps", "save-every"]
        sizes = [part for flag in flags for part in (f"--{flag}", str(getattr(SIZES, flag.replace("-", "_"))))]
        log = ["--store", self.url, "--step-log", str(self.folder / life)]
        return ["-m", "resilio_drills.train", "--compile", "--device", "cpu", *sizes, *log]

    def steps(self, life: str) -> list[dict[str, Any]]:
        """What the ranks of a life wrote down, a line for each step and rank."""
        lines = [line for path in sorted(self.folder.glob(f"{life}.*")) for line in path.read_text().split("\n")]
        # SIGKILL may have cut the last line of a file.
        return [json.loads(line) for line in lines if line.endswith("}")]

    def trained(self, life: str) -> int:
        """The newest step that any rank of this life has done."""
        return max((line["step"] for line in self.steps(life)), default=0)

    def heading(self, text: str) -> None:
        """Announce a stage."""
        print(f"\n[{time.monotonic() - self.began_s:5.1f} s] {text}", flush=True)

    # ------------------------------------------------------------------------------------------------------- processes

    def start(self, arguments: Sequence[str], **env: str) -> subprocess.Popen[str]:
        """Start `python` with these arguments; what it says is passed on, indented."""
        name, _, value = self.mark.partition("=")
        inherited = {k: v for k, v in os.environ.items() if k != "RESILIO_FAILPOINTS"}
        extra = {name: value, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        extra["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")  # leave nothing elsewhere
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**inherited, **extra, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.readers[process.pid] = threading.Thread(target=pass_on, args=(process,), daemon=True)
        self.readers[process.pid].start()
        return process

    def wait(
        self, process: subprocess.Popen[str], limit_s: float, what: str, done: Callable[[], bool] | None = None
    ) -> None:
        """Wait until `done`, by default until the process has ended well; an error if it fails or the time is up."""
        end_s = time.monotonic() + limit_s
        while not (done and done()) and process.poll() is None:
            if time.monotonic() > end_s:
                raise DemoError(f"waited {limit_s:.0f} s for {what}; is the machine that busy?")
            time.sleep(0.02)
        if process.poll() is not None:
            self.readers[process.pid].join(5)  # what it said comes before what we say next
            if process.returncode or (done and not done()):
                raise DemoError(f"waited for {what}, but the process ended (exit code {process.returncode})")

    def end_all(self) -> None:
        """SIGKILL to every process that this demo started, and to what those started.

        A process group is not enough: torchrun gives each rank a session of its own, and so does the compiler to its
        helpers. The launcher is among the first to go, so that it starts no rank again.
        """
        end_s = time.monotonic() + 10
        while (mine := sorted(self.processes())) and time.monotonic() < end_s:
            for pid in mine:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def processes(self) -> Iterator[int]:
        """Processes that carry our mark and have not ended."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look at
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        yield int(entry.name)


def pass_on(process: subprocess.Popen[str]) -> None:
    """Print a child's lines as they come."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  | {line.rstrip()}", flush=True)


def empty(folder: Path) -> None:
    """Make an empty folder, and delete only what an earlier demo made."""
    made_here = folder / "made-by-resilio-demo"
    if folder.exists() and any(folder.iterdir()) and not made_here.exists():
        raise DemoError(f"{folder} holds something that this demo did not make; choose another --dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made_here.touch()


# ---------------------------------------------------------------------------------------------------------------------
# The judgement


def judge(first: list[dict[str, Any]], second: list[dict[str, Any]], killed_at: int, committed: int) -> str:
    """Compare what two lives trained on with what one whole run must have. Returns the closing line.

    Args:
        first: the lines of the killed life; those after the step that was resumed from were for nothing.
        second: the lines of the life after it.
        killed_at: the newest step that the first life had done.
        committed: the step of the last checkpoint that was committed before the kill.
    """
    if not second:
        raise DemoError("the second life trained on nothing")
    resumed = min(line["step"] for line in second) - 1
    kept = [line for line in first if line["step"] <= resumed] + second
    lost, repeated = compare(kept)

    losses = [{line["step"]: line["loss"] for line in lines if line["rank"] == 0} for lines in (first, second)]
    twice = sorted(losses[0].keys() & losses[1].keys())
    apart = max((abs(losses[0][s] / losses[1][s] - 1) for s in twice), default=float("inf"))
    begin, end = losses[0].get(1, float("nan")), losses[1].get(SIZES.steps, float("nan"))
    worlds = [len({line["rank"] for line in lines}) for lines in (first, second)]

    print(f"  {len(twice)} steps were trained in both lives; their losses differ by {apart:.1e} of their value at most")
    promises = {
        f"resumed from step {committed}, the last that was committed": resumed == committed,
        "killed at a later step than that, or it proves nothing": killed_at > resumed,
        "2 ranks before and 1 after": worlds == [2, 1],
        "no sample lost": lost == 0,
        "no sample repeated": repeated == 0,
        f"losses of both lives agree to {LOSS_RTOL:g}": apart <= LOSS_RTOL,
        "the loss fell": end < begin,
    }
    closing = (
        f"killed at step {killed_at} · resumed from step {resumed} · ranks {worlds[0]} → {worlds[1]} · "
        f"loss {begin:.2f} → {end:.2f} · samples lost {lost}, repeated {repeated}"
    )
    if broken := [promise for promise, kept_it in promises.items() if not kept_it]:
        raise DemoError(f"{closing}\nnot as promised: {'; '.join(broken)}")
    return f"\n{closing}"


def compare(lines: list[dict[str, Any]]) -> tuple[int, int]:
    """How many samples are missing at the step where they belong, and how many are there too often."""
    seen = Counter((line["step"], i) for line in lines for i in line["ids"])
    sampler = GlobalSampler(len(windows(corpus(SIZES.corpus_bytes), SIZES.block_size)), SIZES.seed)
    wanted = Counter((step, i) for step in range(1, SIZES.steps + 1) for i in sampler.next_batch(SIZES.global_batch))
    return (wanted - seen).total(), (seen - wanted).total()


if __name__ == "__main__":
    sys.exit(main())
