"""From a checkpoint back to live objects: compare everything, read into scratch, then apply all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import CaptureError, ConfigError
from .context import Context
from .flat import Outcome, SavedState
from .model import ModuleView
from .plan import Own, RestorePlan
from .restore_extras import ExtrasPlanner
from .restore_optimizer import OptimizerPlan
from .rng import derive_rng, restore_rng
from .saved import Rename, Selection, mismatch
from .tensors import put_all
from .training_state import Part, TrainingState, module_prefix

__all__ = ["RestorePlan", "plan_restore"]


def plan_restore(
    state: TrainingState,
    saved: SavedState,
    *,
    rank: int,
    world: int,
    only: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str | None = None,
    absent: Iterable[str] = (),
    rename: Rename | None = None,
    strict: bool = True,
    lent: Mapping[str, torch.Tensor] | None = None,
) -> RestorePlan:
    """Compare live state and checkpoint both ways, and say what to read. Changes nothing.

    Args:
        state: the live objects.
        saved: what the checkpoint holds.
        rank: this process.
        world: number of ranks now.
        only: component names (``"model"``), prefixes or glob patterns of live-side flat keys; all by default.
        exclude: the same for what stays as it is.
        absent: the same, for what this kind of checkpoint never has: no need for it to match anything.
        rename: saved prefix -> live prefix, or a function of saved flat keys. An optimizer follows its model's names.
        strict: whether what is on one side only is an error. Other shapes and dtypes always are.
        lent: live flat key -> host memory for scratch, where it fits. Some may become live state: see
            `Scratch.spare` for what did not.

    Raises:
        MismatchError: lists everything that does not fit.
        ConfigError: a pattern of `only` or `exclude` matches nothing, or `rename` maps two keys to one.

    Ranks: local; all come to the same result.
    """
    ctx = Context(state, saved, rank, world, Selection(only, exclude, absent), rename, strict, lent)
    return _Planner(ctx).plan()


class _Planner:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        modules = (part for part in ctx.state.parts() if part.role == "module")
        self.module_names = {module_prefix(part.path): part.name for part in modules}

    def plan(self) -> RestorePlan:
        try:
            self._parts()
        except CaptureError as error:
            raise mismatch(f"the live state cannot take a checkpoint: {error}") from error
        self._generators()
        self._leftovers()
        for prefix in self.ctx.saved.unused_renames():
            raise ConfigError(
                f"rename={{{prefix!r}: …}} matches nothing; the checkpoint has {', '.join(self._components())}"
            )
        unused = self.ctx.select.unused()
        if unused:
            argument = "only" if unused[0] in (self.ctx.select.only or ()) else "exclude"
            raise ConfigError(
                f"{argument}={unused[0]!r} matches nothing; the checkpoint has {', '.join(self._components())}"
            )
        self.ctx.problems.raise_if_any(self.ctx.saved.saved.step)
        self._say_what_came_from_where()
        return self.ctx.result

    def _say_what_came_from_where(self) -> None:
        """Leaving out the step, which the report tells anyway, and what belongs to a rank: see its component."""
        shared = {new: key for new, key in self.ctx.saved.leaves.items() if not key.startswith("rank.")}
        taken = {new: key for new, key in shared.items() if key in self.ctx.saved.taken}
        self.ctx.result.renamed = {key: new for new, key in taken.items() if new != key}
        self.ctx.result.unused = [key for new, key in shared.items() if new not in taken and key != "step"]

    def _parts(self) -> None:
        modules = self.ctx.state.view_modules()
        optimizers = self.ctx.state.view_optimizers(modules)
        extras = ExtrasPlanner(self.ctx)
        plans: list[OptimizerPlan] = []
        for part in self.ctx.state.parts():
            if part.role == "module":
                self._module(part, modules[part.path])
            elif part.role == "optimizer":
                if self.ctx.present(part, part.name):
                    plan = OptimizerPlan(
                        part.name,
                        optimizers[part.path],
                        self.ctx.saved,
                        self.ctx.problems,
                        lambda key, *also, name=part.name: self.ctx.select(key, name, *also),
                        self.ctx.strict,
                    )
                    plans.append(plan)
                    self._optimizer(plan)
            else:
                extras.plan(part, plans)

    # modules ----------------------------------------------------------------------------------------------------------

    def _module(self, part: Part, view: ModuleView) -> None:
        prefix = part.name
        hidden = ".".join(("buffers_np", *filter(None, [module_prefix(part.path)])))
        own: dict[str, Any] = {}  # canonical name -> saved node, for the module's own load_state_dict
        copies: list[tuple[torch.Tensor, str]] = []  # live tensor, saved key
        skipped: list[str] = []
        missing: list[str] = []
        found = [(f"{prefix}.{name}", name, view.slots.get(name), value) for name, value in view.entries.items()]
        found += [(f"{hidden}.{name}", "", slot, slot.tensor) for name, slot in view.hidden.items()]
        for key, name, slot, value in found:
            node = self.ctx.saved.nodes.get(key)
            if not self.ctx.select(key, part.name):
                skipped.append(key)
                self.ctx.saved.claim(node)
            elif node is None:
                missing.append(key)
            elif isinstance(value, torch.Tensor):
                own_load = bool(name) and view.loads_itself(name)
                scratch = self.ctx.tensor(key, node, slot, value, own=own_load)
                if own_load:
                    own[name] = node
                elif scratch is not None:
                    live, source = view.target(value), self.ctx.saved.source(node.key)
                    copies.append((self.ctx.narrowed(key, live, scratch), source))
                    if live is value:
                        self.ctx.saved.scratch.goes_into(source, live)
            else:
                self.ctx.want_all(node, value)
                own[name] = node
        self.ctx.result.stayed += skipped + missing
        whole = len(missing) == len(found) and found
        if self.ctx.strict:
            self.ctx.problems.missing += [f"{prefix}.*"] if whole and len(missing) > 1 else missing
        if own:
            self.ctx.result.own.append(
                Own(
                    part.name,
                    view.remember,
                    lambda: view.load({name: self.ctx.saved.value(node) for name, node in own.items()}),
                )
            )

        def put() -> None:
            put_all((live, self.ctx.saved.scratch.tensors[source]) for live, source in copies)

        self.ctx.result.stock += [(part.name, put), (part.name, view.written)]
        if not copies and not own and found:
            self.ctx.outcome(part.name, "stayed live", "not asked for" if skipped else "not in the checkpoint")
        else:
            stayed = len(skipped) + len(missing)
            self.ctx.outcome(part.name, "exact", f"{stayed} of {len(found)} keys stayed live" if stayed else "")

    def _optimizer(self, plan: OptimizerPlan) -> None:
        left, of = plan.stayed
        stayed = len(left)
        self.ctx.result.stayed += left
        if stayed == of:
            self.ctx.outcome(plan.name, "stayed live", "none of its keys was asked for and saved")
            return
        plan.take()
        self.ctx.result.checks.append(plan.check)
        if plan.stock:
            self.ctx.result.stock.append((plan.name, plan.assign))
        else:
            self.ctx.result.own.append(Own(plan.name, plan.undo, plan.load_own))
        notes = [f"{stayed} of {of} keys stayed live"] if stayed else []
        self.ctx.outcome(plan.name, "exact", "; ".join(notes + plan.notes))

    def _generators(self) -> None:
        saved = self.ctx.saved.saved
        nodes = {r: self.ctx.saved.nodes.get(f"rank.{r}.rng") for r in range(saved.world)}
        for node in nodes.values():
            self.ctx.saved.claim(node)
        if not self.ctx.state.rng:
            if any(node is not None for node in nodes.values()):
                self.ctx.stays("rng", "rng=False")
            return
        if not self.ctx.select(f"rank.{self.ctx.rank}.rng", "rng"):
            self.ctx.stays("rng", "not asked for")
            return
        node, zero = nodes.get(self.ctx.rank), nodes.get(0)
        if zero is None or (node is None and self.ctx.rank < saved.world):
            if self.ctx.strict:
                self.ctx.problems.missing.append(f"rank.{self.ctx.rank}.rng")
            self.ctx.stays("rng", "not in the checkpoint")
            return
        self.ctx.want_all(zero if node is None else node, None)
        changed = (
            ""
            if self.ctx.world == saved.world
            else f"saved by {saved.world} ranks, {self.ctx.world} now: new ranks derive theirs"
        )

        def put() -> Outcome:
            note = ""
            if node is None:
                derive_rng(self.ctx.saved.value(zero)["torch"], saved.step, self.ctx.rank)
            else:
                note = restore_rng(self.ctx.saved.value(node))
            text = "; ".join(filter(None, [changed, note]))
            return Outcome("rng", "re-derived" if text else "exact", text)

        self.ctx.result.rng.append(put)

    def _leftovers(self) -> None:
        left: dict[str, list[str]] = {}
        for key in self.ctx.saved.unclaimed():
            component = self._component(key)
            if key != "step" and self.ctx.select(key, component):
                left.setdefault(component, []).append(key)
        parts = {part.name for part in self.ctx.state.parts()} | {"rng"}
        for component, keys in left.items():
            known = component in parts or any(part.startswith(component + ".") for part in parts)
            if self.ctx.strict:
                self.ctx.problems.unexpected += keys if known or len(keys) == 1 else [f"{component}.*"]
            elif not known:
                self.ctx.outcome(component, "stayed live", "in the checkpoint only")

    def _components(self) -> list[str]:
        """What the checkpoint has, by the names that `only` and `exclude` take."""
        names = (self._component(key) for key in self.ctx.saved.nodes if not key.startswith("buffers_np"))
        return [name for name in dict.fromkeys(names) if name not in ("", "step")]

    def _component(self, key: str) -> str:
        first, _, rest = key.partition(".")
        if first == "rank":
            return rest.partition(".")[2].partition(".")[0]
        if first != "buffers_np":
            return first
        named = [prefix for prefix in self.module_names if prefix and rest.startswith(prefix + ".")]
        return self.module_names[named[0]] if named else "model"
