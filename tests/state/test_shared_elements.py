"""Tensors whose elements share memory (`expand`, `unfold`): what is saved comes back into the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state.state_helpers import bits, picture, restore, save
from torch import nn

from resilio import TrainingState
from resilio.errors import CaptureError, MismatchError, RestoreError


class Net(nn.Module):
    def __init__(self, first: float, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(first)))
        self.register_buffer("mask", torch.full((1, 3), float(first)).expand(4, 3), persistent=persistent)
        self.register_buffer("one", torch.full((1,), float(first)).expand(4), persistent=persistent)
        self.register_buffer("frames", torch.arange(first, first + 5.0).unfold(0, 3, 1), persistent=persistent)


class Dense(Net):
    """The same names and shapes, each element for itself."""

    def __init__(self, first: float) -> None:
        super().__init__(first)
        for name, buffer in list(self.named_buffers()):
            setattr(self, name, buffer.clone(memory_format=torch.contiguous_format))


class Own(Net):
    """Has a word in its loading."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


def test_of_torch_s_own_loading_a_shared_element_comes_back_and_stays_shared():
    for persistent in (True, False):
        saved, live = Net(1, persistent), Net(5, persistent)
        buffers = dict(live.named_buffers())
        strides = [buffer.stride() for buffer in buffers.values()]
        restore({"model": live}, save({"model": saved}))
        assert picture(live) == picture(saved)
        assert all(buffer is buffers[name] for name, buffer in live.named_buffers())
        assert [buffer.stride() for buffer in live.buffers()] == strides


def test_it_is_the_same_for_a_tensor_and_goes_into_a_dense_one_and_back():
    live = {"x": torch.zeros(1).expand(3)}
    restore(live, save({"x": torch.ones(1).expand(3)}))
    assert live["x"].tolist() == [1, 1, 1]
    assert live["x"].stride() == (0,)
    dense, live_net = Dense(1), Net(7)
    restore({"model": dense}, save({"model": Net(3)}))
    assert bits(dense.state_dict()) == bits(Net(3).state_dict())
    restore({"model": live_net}, save({"model": dense}))
    assert bits(live_net.state_dict()) == bits(Net(3).state_dict())


@pytest.mark.parametrize("name", ["mask", "one", "frames"])
def test_saved_elements_that_differ_where_the_live_ones_are_one_are_refused(name):
    saved, live = Dense(1), Net(5)
    with torch.no_grad():
        saved.get_buffer(name)[1] += 10
    before = picture(live)
    with pytest.raises(MismatchError, match=rf"model\.{name}.*share memory.*clone"):
        restore({"model": live}, save({"model": saved}))
    assert picture(live) == before


def test_a_load_of_one_s_own_cannot_write_it_so_it_is_refused_when_saved():
    with pytest.raises(CaptureError, match=r"model\.mask.*share memory.*Own.*clone"):
        TrainingState(model=Own(1)).capture(0)
    saved, live = Own(1, persistent=False), Own(5, persistent=False)  # which no load_state_dict sees
    restore({"model": live}, save({"model": saved}))
    assert picture(live) == picture(saved)
    with pytest.raises(MismatchError, match=r"model\.mask.*share memory.*clone"):
        restore({"model": Own(1)}, save({"model": Dense(1)}))


class Shows(nn.Module):
    """What `state_dict()` shows expanded is none of its own tensors, and its load takes any."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.first = torch.tensor([first])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"many": self.first.expand(3)}

    def load_state_dict(self, state: Any, **kwargs: Any) -> Any:
        self.first = state["many"][:1].clone()


def test_one_that_is_only_shown_is_for_the_module_s_own_load():
    live = Shows(5)
    restore({"model": live}, save({"model": Shows(1)}))
    assert live.first.item() == 1


class Fails:
    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["x"] == 2:
            raise ValueError("not today")


def test_an_undo_puts_a_model_back_of_which_it_was_left_out():
    shared = ["model.mask", "model.one", "model.frames"]
    live = Own(5)
    before = picture(live)
    stored = save({"model": Dense(1), "zz": Fails()})
    stored.saved.values["zz.x"] = 2
    with pytest.raises(RestoreError, match=r"as it was.*not today") as caught:
        restore({"model": live, "zz": Fails()}, stored, exclude=shared)
    assert type(caught.value) is RestoreError
    assert picture(live) == before
