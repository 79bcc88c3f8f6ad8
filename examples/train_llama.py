"""Your own training loop: a LLaMA from `xla_attention.models`, torch's AdamW, torch_xla's lazy mode.

    python examples/train_llama.py

`xla-attention train` adds what a real run needs: data, schedules, checkpoints, metrics. This is what is left
without them.
"""

from pathlib import Path

import torch
import torch_xla

from xla_attention import pick_device
from xla_attention.models import LlamaConfig, build_model

SEQ_LEN, BATCH_SIZE, STEPS = 128, 8, 60


def main():
    device, description = pick_device()
    print(f"device: {description}")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
    )
    model = build_model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, capturable=True, foreach=False)

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - SEQ_LEN, (BATCH_SIZE, 1))
        ids = text[starts + torch.arange(SEQ_LEN + 1)].to(device)
        loss = model(ids[:, :-1], labels=ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()  # compiles on the first two steps, then runs what was compiled
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
