"""Restoring what is neither module nor optimizer: schedulers, loaders, scalers, plain values."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import torch

from ..records.values import canonical_bytes, encode_value
from .compare import same_nested
from .context import Context
from .extras import PerRank
from .flat import Ref
from .plan import Own, Step
from .putting import into_live
from .restore_optimizer import OptimizerPlan
from .tensors import put_all
from .training_state import Part
from .tree import refs, state_of

__all__ = ["ExtrasPlanner"]

_WORKERS = (
    "Most loaders take a state back only with the number of workers it was saved with: build it with that num_workers, "
    "or exclude 'dataloader'"
)

_log = logging.getLogger("resilio")


class ExtrasPlanner:
    """Plans the parts with a `state_dict` of their own, and plain values.

    Args:
        ctx: the restore.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def plan(self, part: Part, plans: list[OptimizerPlan]) -> None:
        """Plan one part; `plans` are those of the optimizers, which schedulers count on."""
        shared, own = part.name, f"rank.{self.ctx.rank}.{part.name}"
        saved_own = [
            f"rank.{r}.{part.name}"
            for r in range(self.ctx.saved.saved.world)
            if f"rank.{r}.{part.name}" in self.ctx.saved.nodes
        ]
        for key in saved_own:
            self.ctx.saved.claim(self.ctx.saved.nodes[key])
        if saved_own and shared not in self.ctx.saved.nodes:
            self._per_rank(part, own, saved_own)
            return
        if isinstance(part.rule, PerRank) and shared in self.ctx.saved.nodes and self.ctx.select(shared, part.name):
            self.ctx.problems.others.append(
                f"{part.name} was saved as equal on all ranks and is declared per rank now; declare it as it was, or "
                "exclude it"
            )
        if not self.ctx.present(part, shared):
            return
        node = self.ctx.saved.nodes[shared]
        if not self._whole(part, node) or not self._suits(part, node, plans):
            return
        if part.role == "stateful" and not (isinstance(node, dict) and not node):
            self._stateful(part, node)
        elif part.role == "stateful":
            self.ctx.saved.claim(node)
            self._empty(part)
        else:
            self._plain(part, node)
        note = ""
        if part.role == "plain" and not isinstance(part.value, (dict, list, torch.Tensor, np.ndarray)):
            note = f"a plain value: read it as state[{part.path[0]!r}]"
        self.ctx.outcome(part.name, "exact", note)

    def _whole(self, part: Part, node: Any) -> bool:
        self.ctx.saved.claim(node)
        keys = [self.ctx.saved.rename(key) for key in refs(node)]
        chosen = [self.ctx.select(key, part.name) for key in keys]
        if all(chosen):
            return True
        self.ctx.problems.others.append(f"{part.name} can only be restored whole; name it, not keys inside it")
        return False

    def _per_rank(self, part: Part, own: str, saved_own: list[str]) -> None:
        if not self.ctx.select(own, part.name):
            self.ctx.stays(part.name, "not asked for")
            return
        rule = part.rule
        if rule is not None and not isinstance(rule, PerRank):
            self.ctx.problems.others.append(
                f"{part.name} was saved per rank and is declared equal on all ranks now; wrap it in per_rank(), or "
                f"exclude it"
            )
            return
        nodes = [self.ctx.saved.nodes[key] for key in saved_own]
        same_world = self.ctx.world == self.ctx.saved.saved.world
        # A loader that stood at the same place on every rank counts samples globally: it may go on at any world.
        if same_world or (rule is None and self._equal(part, nodes)):
            node = self.ctx.saved.nodes.get(own) if same_world else nodes[0]
            if node is None:
                self.ctx.problems.missing.append(own)
                return
            (self._stateful if part.role == "stateful" else self._plain)(part, node)
            self.ctx.outcome(part.name, "exact")
            return
        resize = rule.on_resize if rule is not None else "refuse"
        if not callable(resize):
            self.ctx.problems.others.append(
                f"{part.name}: saved by {self.ctx.saved.saved.world} ranks with a state each, {self.ctx.world} ranks "
                f"now: there is no "
                f"exact way to divide it. Resume at {self.ctx.saved.saved.world} ranks, pass per_rank(…, "
                f"on_resize=function), "
                f"or exclude {part.name!r}"
            )
            return
        for one in nodes:
            self.ctx.want_all(one, None)

        def put() -> None:
            new = resize([self.ctx.saved.value(node) for node in nodes], self.ctx.rank, self.ctx.world)
            if part.role == "stateful":
                _load(part, new)
            else:
                self._put_plain(part, new)

        self._own(part, put)
        self.ctx.outcome(
            part.name, "re-derived", f"from {self.ctx.saved.saved.world} ranks to {self.ctx.world} by on_resize"
        )

    def _equal(self, part: Part, nodes: list[Any]) -> bool:
        """Whether all ranks saved the same, as far as values tell; a state with tensors is not compared."""
        if any(self.ctx.saved.spec(key) is not None for node in nodes for key in refs(node)):
            return False
        texts = {canonical_bytes(encode_value(self.ctx.saved.value(node), part.name)) for node in nodes}
        return len(nodes) == self.ctx.saved.saved.world and len(texts) == 1

    def _suits(self, part: Part, node: Any, plans: list[OptimizerPlan]) -> bool:
        before = len(self.ctx.problems.others)
        empty = isinstance(node, dict) and not node
        if part.path[0] == "scaler" and callable(getattr(part.value, "is_enabled", None)):
            if empty and part.value.is_enabled():
                self.ctx.problems.others.append(
                    f"{part.name}: the checkpoint was made with loss scaling switched off (bf16 or fp32), here it is "
                    f"on (fp16). If that switch is meant, exclude {part.name!r}: it starts with its initial scale"
                )
            if not empty and not part.value.is_enabled():
                self.ctx.problems.others.append(
                    f"{part.name}: the checkpoint holds a loss scale (fp16), here loss scaling is switched off. If "
                    f"that switch is meant, exclude {part.name!r}"
                )
        if isinstance(part.value, torch.optim.lr_scheduler.LRScheduler) and isinstance(node, dict):
            live = state_of(part.value, part.name)
            for key in (key for key in live if key not in node):
                if self.ctx.strict:
                    self.ctx.problems.missing.append(f"{part.name}.{key}")
            for key in (key for key in node if key not in live):
                if self.ctx.strict:
                    self.ctx.problems.unexpected.append(f"{part.name}.{key}")
            for plan in plans:
                if plan.view.optimizer is getattr(part.value, "optimizer", None) and plan.reordered is not None:
                    self._per_group_lists(part, node, plan)
        return len(self.ctx.problems.others) == before

    def _per_group_lists(self, part: Part, node: dict[Any, Any], plan: OptimizerPlan) -> None:
        order = plan.reordered or []
        for key, below in node.items():
            value = self.ctx.saved.saved.values.get(below.key) if isinstance(below, Ref) else below
            if isinstance(value, list) and len(value) == len(order) and [value[i] for i in order] != value:
                self.ctx.problems.others.append(
                    f"{part.name}.{key} has a value for each parameter group in the saved order, and {plan.name} has "
                    "its groups in another order now; build the groups in the saved order"
                )

    def _stateful(self, part: Part, node: Any) -> None:
        has_tensors = any(self.ctx.saved.spec(key) is not None for key in refs(node))
        self.ctx.want_all(node, state_of(part.value, part.name) if has_tensors else None)
        self._own(part, lambda: _load(part, self.ctx.saved.value(node)))

    def _empty(self, part: Part) -> None:
        # Nothing was in it when saved; many a load_state_dict cannot take that, and need not if nothing is in it now.
        if state_of(part.value, part.name):
            self._own(part, lambda: part.value.load_state_dict({}))

    def _own(self, part: Part, load: Step) -> None:
        hint = _WORKERS if part.path[0] == "dataloader" else ""
        self.ctx.result.own.append(Own(part.name, lambda: self._remember(part), load, hint))

    def _remember(self, part: Part) -> Step:
        if part.role == "plain":
            kept, before = part.value, copy.deepcopy(part.value)
            return lambda: self._put_plain(Part(part.path, part.role, kept, part.rule), before)
        before = copy.deepcopy(part.value.state_dict())
        return lambda: part.value.load_state_dict(before)

    def _plain(self, part: Part, node: Any) -> None:
        live = part.value
        if isinstance(live, torch.Tensor):
            scratch = self.ctx.tensor(part.name, node, None, live)
            if scratch is not None:
                self.ctx.result.stock.append((part.name, lambda: put_all([(live, scratch)])))
            return
        self.ctx.want_all(node, live)
        shape = None if isinstance(node, Ref) else type(node)
        value = self.ctx.saved.saved.values.get(node.key) if isinstance(node, Ref) else None
        if isinstance(live, np.ndarray):
            if not isinstance(value, np.ndarray) or value.shape != live.shape:
                self.ctx.problems.shapes[part.name] = (
                    f"saved {getattr(value, 'shape', type(value).__name__)}, live {live.shape}"
                )
            elif value.dtype != live.dtype:
                self.ctx.problems.dtypes[part.name] = f"saved {value.dtype}, live {live.dtype}"
        elif isinstance(live, (dict, list)):
            kind = shape or type(value)
            if not issubclass(kind, dict if isinstance(live, dict) else list):
                self.ctx.problems.others.append(
                    f"{part.name} is a {type(live).__name__} here and a {kind.__name__} in the checkpoint"
                )
        self.ctx.result.stock.append((part.name, lambda: self._put_plain(part, self.ctx.saved.value(node))))

    def _put_plain(self, part: Part, new: Any) -> None:
        live = part.value
        if isinstance(live, torch.Tensor):
            put_all([(live, new)])
        elif isinstance(live, np.ndarray):
            live[...] = new
        elif isinstance(live, dict):
            merged = into_live(dict(live), new)
            live.clear()
            live.update(merged)
        elif isinstance(live, list):
            live[:] = into_live(list(live), new)
        else:
            self.ctx.state[str(part.path[0])] = new


def _load(part: Part, state: Any) -> None:
    part.value.load_state_dict(state)
    if part.path[0] != "dataloader":
        return
    # torchdata's loader only notes its state here, and winds forward when it is iterated over. That draws from the
    # generators, which are restored by then, and finds only then that a state does not fit. Asked for its state it
    # winds forward now, and the next `iter` goes on from there.
    if not same_nested(part.value.state_dict(), state):
        _log.warning(
            "%s: right after the restore its state is not the one it was given; what is saved from now on may not "
            "come back to the right place (torchdata counts twice what it wound forward in a stream without a "
            "state_dict of its own)",
            part.name,
        )
