"""docs/hooks.md is what the docstrings say, so neither can change without the other."""

from __future__ import annotations

import re

from hooks import hooks_page

from resilio import events
from resilio.hooks import specs


def test_the_page_is_what_the_docstrings_say() -> None:
    """If it differs: ``PYTHONPATH=tests python tests/hooks/hooks_page.py``."""
    page = hooks_page.PAGE.read_text("utf-8")
    assert page.partition(hooks_page.BEGIN)[2].partition(hooks_page.END)[0].strip() == hooks_page.reference().strip()


def test_it_has_every_hook_with_its_arguments_and_every_event() -> None:
    page = hooks_page.PAGE.read_text("utf-8")
    assert re.findall(r"^## `(\w+)`$", page, re.M) == [spec.__name__ for spec in specs.HOOKS]
    assert [name for name in specs.__all__ if name.startswith("resilio_")] == sorted(h.__name__ for h in specs.HOOKS)
    for spec in specs.HOOKS:
        section = page.partition(f"## `{spec.__name__}`\n")[2].partition("\n## ")[0]
        assert (spec.__doc__ or "").partition("\n")[0].replace("``", "`") in section
        for argument in spec.__annotations__:
            assert argument == "return" or f"- `{argument}`: " in section
    for name in events.__all__:
        assert name == "Event" or f"| `{name}` | " in page
