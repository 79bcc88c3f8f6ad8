"""The whole way in minutes, on any machine.

Trains a LLaMA over bytes on Python's own standard library, through the Pallas kernels; evaluates it on files
that it has not seen; lets it write; and compiles its kernels for a TPU.

    python examples/demo.py [--fresh] [KEY=VALUE]...

It uses the TPU if there is one, else the CPU (PJRT_DEVICE=TPU or CPU decides). A run that was interrupted
continues; after one that was finished, or with --fresh, it starts again.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from rich.console import Console

from xla_attention.commands.compile import compile_command
from xla_attention.commands.generate import generate_command
from xla_attention.training.checkpoint import CheckpointFolder, read_progress
from xla_attention.training.config import TrainConfig, load_config
from xla_attention.training.loop import train

CONFIG = Path(__file__).parents[1] / "configs" / "train" / "demo.yaml"
TOPOLOGY = "v5e:2x2"
PROMPT = "def "


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again.")] = False,
) -> None:
    """Train, evaluate, sample, and compile for a TPU."""
    console = Console()
    config = load_config(CONFIG, overrides or [])

    console.rule("train")
    result = train(config, console, fresh=fresh or is_finished(config))
    if result.stopped_by:
        console.print(f"{result.stopped_by}: stopped after step {result.step}; make demo goes on from there")
        return
    first_loss = plot_losses(config.out_dir)

    console.rule("sample")
    generate_command(config.out_dir, PROMPT, max_new_tokens=config.seq_len - len(PROMPT), top_p=0.9, seed=1)

    console.rule(f"compile for {TOPOLOGY}")
    compile_command(CONFIG, overrides, topology=TOPOLOGY)

    console.rule("summary")
    console.print(
        f"held-out loss {result.eval_loss:.3f} nats per byte, from {first_loss:.3f} at the first step"
    )
    console.print(f"loss curve: {config.out_dir / 'loss.png'}")
    console.print(f"more text: xla-attention generate {config.out_dir} --prompt 'class '")


def is_finished(config: TrainConfig) -> bool:
    """Whether an earlier demo reached its last step."""
    latest = CheckpointFolder(config.out_dir / "checkpoints", config.checkpoint.keep_last).latest()
    return latest is not None and read_progress(latest)["step"] >= config.steps


def plot_losses(out_dir: Path) -> float:
    """Draws `loss.png` from `metrics.jsonl`; returns the loss of the first step."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, style, label in (("loss", "-", "training"), ("eval_loss", "o-", "held-out files")):
        points = [(record["step"], record[key]) for record in records if key in record]
        axes.plot(*zip(*points), style, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A LLaMA over bytes learns Python")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out_dir / "loss.png", dpi=150)
    return records[0]["loss"]


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
