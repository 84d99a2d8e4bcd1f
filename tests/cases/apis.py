"""What a driver may ask of a model: of one on one device (`EagerApi`), and of a parallel one (`ParallelApi`).

State and gradients are exchanged as full tensors under the model's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar3d import ParallelModule, collectives
from autopar3d.layout import Layout
from autopar3d.running.execute import LockstepExecutor
from autopar3d.running.state import fitted, whole


class EagerApi:
    """One device."""

    rank, world = 0, 1

    def __init__(self, make: Callable[[], nn.Module], other: Callable[[], nn.Module] | None = None) -> None:
        self._make, self._other = make, other or make

    def state_dict(self, m: nn.Module) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in m.state_dict().items()}

    def load_state_dict(self, m: nn.Module, state: dict[str, Tensor]) -> None:
        m.load_state_dict(state, strict=True)

    def buffers(self, m: nn.Module) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in m.named_buffers()}

    def grads(self, m: nn.Module) -> dict[str, Tensor | None]:
        return {k: None if p.grad is None else whole(p.grad) for k, p in m.named_parameters()}

    def zero_grad(self, m: nn.Module) -> None:
        m.zero_grad(set_to_none=True)

    def set_requires_grad(self, m: nn.Module, wanted: Callable[[str], bool]) -> None:
        for name, p in m.named_parameters():
            p.requires_grad_(wanted(name))

    def optimizer(self, m: nn.Module, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        return cls(m.parameters(), **options)

    def optim_state_dict(self, m: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Any]:
        return opt.state_dict()

    def load_optim_state_dict(self, m: nn.Module, opt: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        opt.load_state_dict(state)

    def clip_grad_norm_(self, m: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm = nn.utils.clip_grad_norm_(m.parameters(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def poison_grad(self, m: nn.Module, name: str, index: Any, value: float) -> None:
        """Set one element of a gradient, by its place in the whole tensor."""
        grad = dict(m.named_parameters())[name].grad
        assert grad is not None
        full = whole(grad)
        full[index] = value
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.copy_(fitted(full, grad))

    def scaler_step(self, scaler: torch.amp.GradScaler, opt: torch.optim.Optimizer, m: nn.Module) -> None:
        scaler.step(opt)

    def fresh_model(self) -> nn.Module:
        return self._make()

    def recompile_other_grid(self) -> nn.Module:
        return self._other()

    def local_numel(self, m: nn.Module) -> int:
        return sum(p.numel() for p in m.parameters())

    def same_on_all_ranks(self, t: Tensor) -> bool:
        return True

    def collectives_agree(self, m: nn.Module) -> bool:
        return True


class ParallelApi(EagerApi):
    """A grid; the models that a driver makes itself may be plain ones still."""

    def state_dict(self, m: nn.Module) -> dict[str, Tensor]:
        return m.full_state_dict() if isinstance(m, ParallelModule) else super().state_dict(m)

    def optim_state_dict(self, m: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Any]:
        return m.full_optim_state_dict(opt) if isinstance(m, ParallelModule) else opt.state_dict()

    def load_optim_state_dict(self, m: nn.Module, opt: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if isinstance(m, ParallelModule):
            m.load_full_optim_state_dict(opt, state)
        else:
            opt.load_state_dict(state)


class RankApi(ParallelApi):
    """This rank of a process group; every rank asks the same."""

    def __init__(self, make: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> None:
        super().__init__(make, other)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def local_numel(self, m: nn.Module) -> int:
        return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in m.parameters())

    def same_on_all_ranks(self, t: Tensor) -> bool:
        value = whole(t)
        return all(torch.equal(value, other) for other in _exchange(value))

    def collectives_agree(self, m: nn.Module) -> bool:
        mine = issued(m)
        return all(theirs == mine for theirs in _exchange(mine))


class SimulatedApi(ParallelApi):
    """All ranks of a grid in this process; answers for rank 0."""

    def __init__(self, make: Callable[[], nn.Module], other: Callable[[], nn.Module], executor: Witness) -> None:
        super().__init__(make, other)
        self.executor = executor
        self.world = executor.grid.size

    def local_numel(self, m: nn.Module) -> int:
        if not isinstance(m, ParallelModule):
            return super().local_numel(m)
        step = m.__dict__["_ap3d"].last.step
        held = {a.names[0]: lay for a, lay in zip(step.program.arguments, step.argument_layouts, strict=True)}
        shards = (held[name].shard(p.detach(), self.executor.grid, 0) for name, p in m.named_parameters())
        return sum(s.numel() for s in shards)

    def same_on_all_ranks(self, t: Tensor) -> bool:
        """Whether, in all that left the ranks so far, every rank's copy of an element was the same."""
        return not self.executor.torn

    def collectives_agree(self, m: nn.Module) -> bool:
        """Whether every collective so far found parts of one size on all ranks of its group."""
        return not self.executor.uneven


class Witness(LockstepExecutor):
    """Runs ranks in lock-step, and notes where they part: `torn` copies, and collectives of `uneven` parts."""

    def __init__(self, grid: Any) -> None:
        super().__init__(grid)
        self.torn: list[str] = []
        self.uneven: list[str] = []

    def leave(self, value: list[Tensor], layout: Layout, shape: tuple[int, ...], *, sharded: bool) -> Tensor:
        return self._assembled("result", value, layout, shape)

    def gradient(self, value: list[Tensor], layout: Layout, like: Tensor) -> Tensor:
        return self._assembled("gradient", value, layout, tuple(like.shape))

    def run(self, graph: torch.fx.GraphModule, values: Sequence[Any], **how: Any) -> list[Any]:
        for number, value in enumerate(values):
            shapes = [tuple(v.shape) for v in value if isinstance(v, Tensor)]
            if len(set(shapes)) > 1:
                self.uneven.append(f"argument {number} of a graph: {shapes}")
        return super().run(graph, values, **how)

    def _assembled(self, what: str, value: list[Tensor], layout: Layout, shape: tuple[int, ...]) -> Tensor:
        made = layout.assemble(value, shape, self.grid)
        for rank, part in enumerate(value):
            again = layout.shard(made, self.grid, rank)
            for d, n in enumerate(layout.valid_shape(shape, self.grid, rank)):  # pads hold anything
                part, again = part.narrow(d, 0, n), again.narrow(d, 0, n)
            if not torch.allclose(part, again, rtol=0.0, atol=0.0, equal_nan=True):
                self.torn.append(f"{what} {layout} on rank {rank}")
        return made


def issued(m: nn.Module) -> list[tuple[str, str, float]]:
    """The collectives of every graph that a module has run, in order: kind, axis, elements."""
    assert isinstance(m, ParallelModule)
    found = []
    for prepared in m.__dict__["_ap3d"].steps.values():
        runs = prepared.step.runs
        for graph in (runs.forward, runs.backward, runs.inference):
            found += [(c.kind, c.axis, float(c.elements)) for c in collectives(graph)] if graph is not None else []
    return found


def _exchange(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
