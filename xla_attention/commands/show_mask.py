"""`xla-attention show-mask`."""

from pathlib import Path
from typing import Annotated

import typer


def show_mask_command(
    name: Annotated[str, typer.Argument(help="A variant, such as causal; 'all' draws each.")],
    out: Annotated[
        Path | None, typer.Option(help="PNG to write, or folder for all.  [default: NAME.png]")
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Queries and keys.")] = 256,
    block: Annotated[int, typer.Option(min=1, help="Queries and keys of a block.")] = 16,
    heads: Annotated[int, typer.Option(min=1, help="Heads of the example.")] = 4,
    head: Annotated[int, typer.Option(min=0, help="Which head is drawn.")] = 0,
) -> None:
    """Draw a variant of attention: its scores, and which blocks it empties or fills."""
    from xla_attention.flex.pictures import draw
    from xla_attention.flex.variants import VARIANTS, Problem

    if name != "all" and name not in VARIANTS:
        raise ValueError(f"name: got {name!r}, known are all, {', '.join(VARIANTS)}")
    if head >= heads:
        raise ValueError(f"head: got {head}, must be below heads={heads}")
    problem = Problem(1, heads, length, length)
    for each in VARIANTS if name == "all" else [name]:
        path = (out or Path()) / f"{each}.png" if name == "all" else out or Path(f"{each}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(VARIANTS[each](problem), problem, path, title=each.replace("_", " "), block=block, head=head)
        typer.echo(path)
