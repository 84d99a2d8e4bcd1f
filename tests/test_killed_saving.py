"""A rank that dies while it saves, as examples/train_resumable.py does it: the checkpoint before it is whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

import autopar3d
from autopar3d.errors import RankError
from autopar3d.ranks.launch import Pool

EXAMPLES = str(Path(__file__).parents[1] / "examples")


def _started(grid: tuple[int, int, int]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 6))
    par = autopar3d.compile(model, grid, torch.ones(6, 6))
    return par, torch.optim.AdamW(par.parameters(), lr=0.1, foreach=True)


def _step(par: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    par(torch.ones(6, 6)).square().mean().backward()
    optimizer.step()


def _state(par: Any, optimizer: Any) -> list[Tensor]:
    moments = par.full_optim_state_dict(optimizer)["state"]
    return [*par.full_state_dict().values(), *(t for one in moments.values() for t in one.values())]


def _saves_and_dies(folder: Path) -> None:
    sys.path.insert(0, EXAMPLES)
    from train_resumable import save

    par, optimizer = _started((2, 1, 1))
    _step(par, optimizer)
    save(folder, par, optimizer, 1)
    torch.save((_state(par, optimizer), par.random_state()), folder / f"expected{os.getpid()}")
    _step(par, optimizer)
    if torch.distributed.get_rank() == 1:
        write = FileSystemWriter.write_data

        def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
            write(self, *args, **kwargs)  # its part is on disk, what ties the parts together is not
            os._exit(9)

        FileSystemWriter.write_data = dying  # type: ignore[method-assign]
    save(folder, par, optimizer, 2)


def _resumed(folder: Path, grid: tuple[int, int, int]) -> tuple[int, list[Tensor], Any]:
    sys.path.insert(0, EXAMPLES)
    from train_resumable import load

    par, optimizer = _started(grid)
    done = load(folder, par, optimizer)
    return done, _state(par, optimizer), par.random_state()


def test_the_checkpoint_before_is_whole_and_loads_on_any_grid(ranks: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: the process exited with status 9"):
        ranks.run(_saves_and_dies, tmp_path, ranks=2, timeout=120)
    assert (tmp_path / "new").exists() and not (tmp_path / "new" / ".metadata").exists()
    expected, random = torch.load(next(tmp_path.glob("expected*")), weights_only=False)
    for grid, count in ((2, 1, 1), 2), ((1, 3, 1), 3), ((1, 1, 1), 1):  # the same, one that divides other dims, fewer
        for done, found, at in ranks.run(_resumed, tmp_path, grid, ranks=count, timeout=120):
            assert done == 1
            assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert str(at) == str(random)
