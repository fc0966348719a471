"""The commands about other files: restore and export write a version to a file, import reads one from a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstate.checkpointer import Checkpointer, open_quietly
from tierstate.cli.output.versions import show_exported, show_imported, show_restored
from tierstate.engine.progress import byte_progress
from tierstate.engine.restore.restore import OnDamage
from tierstate.files.atomic_files import AtomicFiles
from tierstate.files.readers.reader import MAX_STEP
from tierstate.manifest.errors import TierstateError
from tierstate.tiers.units import parse_size

from .options import Force, Id, Json, Only, PolicyFile, Rename, Run, Step, TagName, open_run, parse_rename

app = typer.Typer()


@app.command()
def restore(
    policy: PolicyFile,
    run: Run,
    to: Annotated[Path, typer.Argument(help="The file to write, readable with torch.load.")],
    step: Step = None,
    version: Id = None,
    tag: TagName = None,
    only: Only = None,
    older: Annotated[bool, typer.Option("--older", help="On damage, go back to the newest whole version.")] = False,
    allow_pickle: Annotated[list[str] | None, typer.Option(help="Leaves whose pickles may be loaded.")] = None,
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Also leaves saved with fewer bits.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Restore a version into one file that torch.load reads.

    By default the newest. Every chunk is verified. A state with NumPy arrays, as ts.Rng has, takes
    torch.load(FILE, weights_only=False).
    """
    AtomicFiles(force=force).check(to)  # now, as the rest takes a while
    with open_run(policy, run, allow_pickle=allow_pickle or ()) as ckpt:
        damage: OnDamage = "older" if older else "raise"
        with byte_progress("restoring", shown=not as_json, total=_nbytes(ckpt, step, version, tag, only)) as progress:
            state = ckpt.load(
                step=step, version=version, tag=tag, only=only, on_damage=damage, allow_lossy=allow_lossy,
                progress=progress,
            )  # fmt: skip
        _save_whole(state, to)
        assert ckpt.restored is not None
        show_restored(ckpt.restored, to, as_json)


def _nbytes(
    ckpt: Checkpointer, step: int | None, version: str | None, tag: str | None, only: list[str] | None
) -> Callable[[], int | None]:
    """Returns how many bytes will be read; None where that is not known."""

    def nbytes() -> int | None:
        with suppress(TierstateError):  # which is told where the version is read
            return None if only else ckpt.info(step=step, version=version, tag=tag).nbytes
        return None

    return nbytes


@app.command()
def export(
    policy: PolicyFile,
    run: Run,
    to: Annotated[Path, typer.Argument(help="The file to write: its name ends with .safetensors, .h5 or .hdf5.")],
    step: Step = None,
    version: Id = None,
    tag: TagName = None,
    only: Only = None,
    rename: Rename = None,
    strip_prefix: Annotated[str, typer.Option(help="What every tensor's name begins with, to be left off.")] = "",
    max_shard: Annotated[str, typer.Option(help="Bytes in one .safetensors file before there are several.")] = "5GiB",
    skip_values: Annotated[bool, typer.Option("--skip-values", help="Leave out what is no such tensor.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a version to a safetensors or HDF5 file.

    By default the newest. Every chunk is verified.
    """
    from tierstate.files.export import export as write

    with (
        open_run(policy, run) as ckpt,
        byte_progress(
            "exporting",
            shown=not as_json,
            total=_nbytes(ckpt, step, version, tag, only),
        ) as progress,
    ):
        found = write(
            ckpt,
            to,
            step=step,
            version=version,
            tag=tag,
            only=only,
            rename=parse_rename(rename),
            strip_prefix=strip_prefix,
            max_shard=parse_size(max_shard),
            skip_values=skip_values,
            force=force,
            progress=progress,
        )
    show_exported(found, as_json)


@app.command("import")
def import_file(
    policy: PolicyFile,
    run: Run,
    source: Annotated[str, typer.Argument(help="A safetensors, HDF5 or torch.save file, or a folder of checkpoints.")],
    step: Annotated[
        int | None, typer.Option(min=0, max=MAX_STEP, help="The new version's step; none: the file's own, or 0.")
    ] = None,
    under: Annotated[str, typer.Option(help="The key to put the state under, as in 'model'.")] = "",
    skip_values: Annotated[
        bool, typer.Option("--skip-values", help="Leave out an HDF5 file's text and attributes, Megatron's common.pt.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Save what is in another program's file as a new version.

    No code in the file is run.
    """
    from tierstate.files.importing import import_version

    with open_quietly(policy, run) as ckpt, byte_progress("importing", shown=not as_json) as progress:
        info = import_version(ckpt, source, step=step, under=under, skip_values=skip_values, progress=progress)
    show_imported(info, source, as_json)


def _save_whole(state: Any, to: Path) -> None:
    """Save the state to a temporary file, then rename it: the file is whole or absent."""
    import torch

    handle, name = tempfile.mkstemp(dir=to.parent, prefix=f".{to.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, to)
    except BaseException:
        os.unlink(name)
        raise
