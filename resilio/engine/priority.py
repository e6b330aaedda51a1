"""Who gets a core first: training."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["give_way"]

# Of the share that the kernel gives to a thread of training this leaves about a tenth where both want one core, and all
# of a core that is idle. 300 MB on 2 busy cores: the step beside a save took 1.3 instead of 1.7 times its time.
_NICE = 10


def give_way() -> None:
    """Let this thread, and those that it starts, run where training leaves a core. For good: the thread must be ours.

    Linux alone knows threads that differ from their process; elsewhere nothing is done.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox that knows no such call
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))
