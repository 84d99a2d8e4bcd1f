"""`transformers.Trainer` around a compiled model: its loop, schedules, accumulation, clipping, logs and evaluation.

    torchrun --nproc-per-node 8 examples/recipes/hf_trainer.py --grid 2,2,2 --folder trained

`Trainer` leaves a model alone that says it is distributed already, as one that `from_pretrained` sharded does. What is
left to say is which batches a rank reads (here: all the same, seeded alike), and how the model is saved.
Not for `Trainer`: resuming (it would save one rank's shards of the optimizer; see training_loop.py), and
`load_best_model_at_end`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainingArguments

import autopar3d


class GridTrainer(Trainer):
    """Trains `model` on a grid. The batch sizes of `args`, "per device" by name, are of global shape."""

    def __init__(
        self,
        model: PreTrainedModel,
        grid: tuple[int, int, int],
        example: Mapping[str, Tensor],
        args: TrainingArguments,
        **more: Any,
    ) -> None:
        if args.save_strategy != "no" and not args.save_only_model:
            raise ValueError("pass save_only_model=True: Trainer would save one rank's shards of the optimizer")
        par = autopar3d.compile(model, grid, example_kwargs=example, outputs="loss")
        par.is_distributed_loading_by_transformers = True  # read by Trainer: do not wrap it, do not move it
        par.accepts_loss_kwargs = False  # the loss is the mean over the batch, as planned
        with torch.device("meta"):
            self.plain = type(model)(model.config)  # names, and how to save: it holds no values
        super().__init__(par, args, **more)

    def _loader(self, data: Dataset[Any], rows: int, *, shuffle: bool) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.args.seed)  # alike on all ranks
        return DataLoader(
            data, rows, shuffle=shuffle, generator=order, collate_fn=self.data_collator, drop_last=shuffle
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The same batches on every rank: each uses its part."""
        return self._loader(self.train_dataset, self.args.train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As for training, in order."""
        return self._loader(eval_dataset or self.eval_dataset, self.args.eval_batch_size, shuffle=False)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Which parameters are decayed goes by the type of their module: ask the model as it was."""
        return super().get_decay_parameter_names(self.plain)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As a plain model, for `from_pretrained`."""
        state = self.model.full_state_dict()  # all ranks take part
        if self.args.should_save:
            self.plain.save_pretrained(output_dir or self.args.output_dir, state_dict=state)


class Counting(Dataset[dict[str, Tensor]]):
    """Rows of numbers that count up."""

    def __init__(self, config: GPT2Config, size: int = 64, length: int = 16) -> None:
        self.config, self.size, self.length = config, size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(self.length) + 7 * index) % self.config.vocab_size
        return {"input_ids": ids, "labels": ids}


def small() -> GPT2LMHeadModel:
    """A GPT-2 without dropout, so that it can be compared with one device."""
    torch.manual_seed(0)
    sizes: dict[str, int] = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def arguments(folder: Path, steps: int) -> TrainingArguments:
    """What `Trainer` is told, on a grid as on one device."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        weight_decay=0.1,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=steps,
        save_strategy="no",
        prediction_loss_only=True,
        remove_unused_columns=False,  # the compiled model takes (*args, **kwargs), so Trainer cannot know them
        label_names=["labels"],
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def train(grid: tuple[int, int, int], folder: Path, *, steps: int = 10) -> list[dict[str, float]]:
    """What every rank runs; what `Trainer` logged."""
    args = arguments(folder, steps)
    model = small().to(args.device)
    data = Counting(model.config)
    example = {name: torch.stack([row, row]).repeat(4, 1).to(args.device) for name, row in data[0].items()}
    trainer = GridTrainer(model, grid, example, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    trainer.save_model()
    return trainer.state.log_history


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
    logs = train((x, y, z), options.folder)
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{log['loss']:.3f}" for log in logs if "loss" in log))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
