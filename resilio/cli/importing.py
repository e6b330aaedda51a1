"""`resilio import`: a run that begins with a model from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import Exit
from .options import Debug, Json, Trust

__all__ = ["import_"]

_STEP_LIMIT = 999_999_999


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="x.safetensors, a folder of them, or a torch.save file.", show_default=False
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="URL", help="The run to make.", show_default=False)] = ...,  # type: ignore[assignment]
    step: Annotated[int, typer.Option(metavar="N", help="Optimizer steps that made it.", min=0, max=_STEP_LIMIT)] = 0,
    strip_prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="What to take off the begin of names, e.g. 'module.'.")
    ] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew over a run that has checkpoints; those stay, off the lineage.")
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Make a run whose first checkpoint is a model from safetensors or torch.save: restore(only=["model"]) takes it.

    A file of torch.save is read with weights_only=True: nothing in it is run, unless you say --trust.

    Exit codes: 0 saved; 1 the source is damaged, or no such file; 4 it is not there.
    """
    from ..errors import ConfigError, NoCheckpointError
    from ..hooks import open_storage
    from ..manager import CheckpointManager
    from ..records.catalog import discover
    from ..state.training_state import TrainingState
    from . import look, output
    from .sources import module_of, read_source

    path = Path(source)
    if not path.exists():
        raise NoCheckpointError(f"{path} is not there.")
    with open_storage(to) as storage:
        taken = ConfigError(
            f"{storage.url} has checkpoints already. Choose another --to; or begin anew over them with --fresh: "
            "they stay, off the lineage."
        )
        if discover(storage).commits and not fresh:
            raise taken
    tensors: dict[str, Any] = {}
    for name, tensor in read_source(path, trust).items():
        new = name.removeprefix(strip_prefix)
        if not new or new in tensors:
            raise ConfigError(f"without {strip_prefix!r}, {name!r} has no name, or another one's.")
        tensors[new] = tensor
    state = TrainingState(model=module_of(tensors), rng=False)
    with CheckpointManager(to, state, mode="sync", fresh=fresh) as ckpt:
        if not fresh and ckpt.restore().found is not None:  # made meanwhile; what was read is not in `state` any more
            raise taken
        ref = ckpt.save(step).result()
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if as_json:
        output.emit_json({"url": storage.url, **look.named(ref), "tensors": len(tensors), "from": source})
    else:
        said = f"{output.count(len(tensors), 'tensor')}, {output.size(size_bytes)}"
        output.emit(output.clean(f"{source}  ->  {storage.url}, step {step}: {said}") + "\n")
    return Exit.GOOD
