"""Writing into live tensors: exact at every layout, seen by autograd, by several threads at a time."""

from __future__ import annotations

import pytest
import torch

from resilio.state import tensors
from resilio.state.tensors import put, put_all


def _layouts():
    base = torch.zeros(6, 8)
    yield torch.zeros(6, 8)
    yield base.t().contiguous().t()
    yield torch.zeros(6, 16)[:, ::2]
    yield torch.zeros(6, 8, dtype=torch.complex64).conj()
    with torch.inference_mode():
        inference = torch.zeros(6, 8)
    yield inference


@pytest.mark.parametrize("live", list(_layouts()), ids=["rows", "columns", "every second", "conjugated", "inference"])
def test_what_is_put_is_there_whatever_the_layout(live):
    saved = torch.randn(6, 8, dtype=live.dtype)
    with torch.inference_mode(live.is_inference()):
        put(live, saved)
    assert torch.equal(live, saved)


def test_a_backward_over_the_values_before_is_refused():
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    put(weight, torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("in_threads", [True, False])
def test_all_are_put_and_of_two_for_one_tensor_the_last(monkeypatch, in_threads):
    monkeypatch.setattr(tensors, "_WORTH_THREADS", 0 if in_threads else 1 << 60)
    live = [torch.zeros(n, n) for n in range(40)]
    saved = [torch.full((n, n), float(n)) for n in range(40)]
    put_all([(live[7], torch.ones(7, 7)), *zip(live, saved, strict=True)])
    assert all(map(torch.equal, live, saved))


def test_what_fails_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(tensors, "_WORTH_THREADS", 0)
    with pytest.raises(RuntimeError):
        put_all([(torch.zeros(3), torch.zeros(4))])
