"""`transformers.Trainer` around a compiled model: its loop, schedules, accumulation, clipping, logs and evaluation.

    torchrun --nproc-per-node 8 examples/recipes/hf_trainer.py --grid 2,2,2 --folder trained
    torchrun --nproc-per-node 4 examples/recipes/hf_trainer.py --grid 2,2,1 --resume trained/checkpoint-5

`Trainer` leaves a model alone that says it is distributed already, as one that `from_pretrained` sharded does. What is
left to say is which batches a rank reads (here: all the same, seeded alike), and how the model and the checkpoints are
saved: each rank its shards, so that training goes on from one on any grid. `load_best_model_at_end` is not for it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
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
        par = autopar3d.compile(model, grid, example_kwargs=example, outputs="loss")
        par.is_distributed_loading_by_transformers = True  # read by Trainer: do not wrap it, do not move it
        par.accepts_loss_kwargs = False  # the loss is the mean over the batch, as planned
        with torch.device("meta"):
            self.plain = type(model)(model.config)  # names, and how to save: it holds no values
        super().__init__(par, args, **more)

    def _loader(self, data: Dataset[Any], rows: int, *, shuffle: bool) -> DataLoader[Any]:
        # One part of the data: alike on all ranks.
        sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle, seed=self.args.seed)
        batches = Batches(sampler, rows, drop_last=shuffle)
        return EpochLoader(data, batch_sampler=batches, collate_fn=self.data_collator)

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
        """As a plain model, for `from_pretrained`; in a checkpoint, beside it what training goes on from."""
        folder = Path(output_dir or self.args.output_dir)
        state = self.model.full_state_dict()  # all ranks take part
        if self.args.should_save:
            self.plain.save_pretrained(folder, state_dict=state)
        if _internal_call:
            dcp.save(self._content()[1], checkpoint_id=folder / "grid")

    def _content(self) -> tuple[Any, dict[str, Any]]:
        """The optimizer itself, and what a checkpoint holds; tensors are each rank's shards."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        state, optim_state = get_state_dict(self.model, optimizer)
        extra = {"scheduler": self.lr_scheduler.state_dict(), "random": self.model.random_state()}
        return optimizer, {"model": state, "optim": optim_state, "extra": extra}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: the parameters come with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The way back, from a checkpoint of any grid."""
        if checkpoint is None:
            return
        optimizer, content = self._content()
        dcp.load(content, checkpoint_id=Path(checkpoint) / "grid")
        set_state_dict(self.model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"])
        self.lr_scheduler.load_state_dict(content["extra"]["scheduler"])
        self.model.set_random_state(content["extra"]["random"])


class Batches(BatchSampler):
    """Each epoch in an order of its own, which `Trainer` asks for by number; it resumes in the middle of one too."""

    def set_epoch(self, epoch: int) -> None:
        """Of the batches to come."""
        sampler: Any = self.sampler
        sampler.set_epoch(epoch)


class EpochLoader(DataLoader[Any]):
    """Passes the number of the epoch on."""

    def set_epoch(self, epoch: int) -> None:
        """Of the batches to come."""
        batches: Any = self.batch_sampler
        batches.set_epoch(epoch)


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
        save_strategy="steps",
        save_steps=5,
        save_only_model=True,  # Trainer's own would hold the optimizer of rank 0 alone; `save_model` adds the grid's
        prediction_loss_only=True,
        remove_unused_columns=False,  # the compiled model takes (*args, **kwargs), so Trainer cannot know them
        label_names=["labels"],
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def train(
    grid: tuple[int, int, int], folder: Path, *, steps: int = 10, resume: Path | None = None
) -> list[dict[str, float]]:
    """What every rank runs; what `Trainer` logged."""
    args = arguments(folder, steps)
    model = small().to(args.device)
    data = Counting(model.config)
    example = {name: torch.stack([row, row]).repeat(4, 1).to(args.device) for name, row in data[0].items()}
    trainer = GridTrainer(model, grid, example, args, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.save_model()
    return trainer.state.log_history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2,2,2")
    parser.add_argument("--folder", type=Path, default=Path("trained"))
    parser.add_argument("--resume", type=Path, help="a checkpoint, such as trained/checkpoint-5")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    x, y, z = (int(size) for size in options.grid.split(","))
    logs = train((x, y, z), options.folder, resume=options.resume)
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{log['loss']:.3f}" for log in logs if "loss" in log))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
