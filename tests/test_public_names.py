"""What `resilio` offers: sorted, complete, and each name resolves."""

from __future__ import annotations

import pytest

import resilio


def test_the_names_are_sorted_and_shown() -> None:
    assert sorted(set(resilio.__all__)) == resilio.__all__
    assert set(resilio.__all__) <= set(dir(resilio))


@pytest.mark.parametrize("name", resilio.__all__)
def test_each_name_resolves(name: str) -> None:
    assert getattr(resilio, name) is getattr(resilio, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="keep_nothing"):
        _ = resilio.keep_nothing
