"""Options of the commands that compile attention of given shapes."""

from typing import Annotated

import typer

Topology = Annotated[str, typer.Option(help="TPU slice, such as v5e:2x2 or v5p-8.")]
Topologies = Annotated[
    list[str], typer.Option(help="TPU slice, such as v5e:2x2 or v5p-8; may be given several times.")
]
Batch = Annotated[int, typer.Option(help="Sequences.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KvHeads = Annotated[int, typer.Option(help="Heads of keys and values.")]
SeqLen = Annotated[int, typer.Option(help="Queries and keys of one sequence.")]
HeadDim = Annotated[int, typer.Option(help="Elements of one head.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
MaskName = Annotated[str, typer.Option(help="causal, full, or window:N for N keys.")]
Passes = Annotated[str, typer.Option("--pass", help="forward, backward, or both.")]
