"""A HuggingFace model, its batches and its learning rate schedule, trained on a grid and saved as a plain model.

    torchrun --nproc-per-node 8 examples/recipes/huggingface.py --grid 2,2,2 --folder trained

The loop is written out: it is short, and collators, schedules and `save_pretrained` work as ever. `hf_trainer.py` has
the same with `transformers.Trainer`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import autopar3d


def batch_of(step: int, config: GPT2Config, rows: int = 8, length: int = 16) -> dict[str, Tensor]:
    """The same batch on every rank, as of a data collator: each rank uses its part."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(config.vocab_size, (rows, 1), generator=generator)
    ids = (start + torch.arange(length)) % config.vocab_size
    return {"input_ids": ids, "labels": ids}


def train(grid: tuple[int, int, int], folder: Path, *, steps: int = 10, device: str = "cpu") -> list[float]:
    """What every rank runs; the losses."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(config).to(device)
    example = {name: tensor.to(device) for name, tensor in batch_of(0, config).items()}
    # Keyword arguments as the model is called with them. The loss is one of its outputs; the logits stay sharded.
    par = autopar3d.compile(model, grid, example_kwargs=example)
    optimizer = torch.optim.AdamW(par.parameters(), lr=5e-3, foreach=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        output = par(**{name: tensor.to(device) for name, tensor in batch_of(step, config).items()})
        output.loss.backward()
        nn.utils.clip_grad_norm_(par.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(output.loss.item())
    state = par.full_state_dict()  # all ranks take part
    if dist.get_rank() == 0:
        model.load_state_dict(state)
        model.save_pretrained(folder)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2,2,2")
    parser.add_argument("--folder", type=Path, default=Path("trained"))
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    x, y, z = (int(size) for size in options.grid.split(","))
    losses = train((x, y, z), options.folder, device="cuda" if cuda else "cpu")
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
