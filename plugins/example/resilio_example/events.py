"""Events as JSON lines, added to the file that ``RESILIO_EXAMPLE_EVENTS`` names."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from resilio.events import Event


def write_down(event: Event) -> None:
    """One event, one line. Whoever waits for this is the training loop: a slow sink would hand over to a thread."""
    path = os.environ.get("RESILIO_EXAMPLE_EVENTS")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            line = json.dumps({"event": type(event).__name__, **asdict(event)}, default=str)
            file.write(f"{line}\n")
