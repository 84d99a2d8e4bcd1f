"""Local ranks: what a function sees, what its caller gets, and that no failure hangs or lingers."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar3d.errors import GridError, RankError
from autopar3d.grid import Grid
from autopar3d.ranks.launch import Pool, launch, rank_count


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of `x` times the rank."""
    y = x * dist.get_rank()
    dist.all_reduce(y)
    return y


def surroundings() -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {
        **{name: os.environ.get(name) for name in names},
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "hash": hash("a string"),
        "random": torch.rand(()).item(),
        "dtype": torch.get_default_dtype(),
    }


def test_a_rank_sees_what_torchrun_would_give_it(ranks: Pool) -> None:
    seen = ranks.run(surroundings, ranks=3)
    assert [s["rank"] for s in seen] == [0, 1, 2]
    for i, s in enumerate(seen):
        assert (s["RANK"], s["LOCAL_RANK"], s["WORLD_SIZE"]) == (str(i), str(i), "3")
        assert (s["world"], s["backend"], s["threads"]) == (3, "gloo", 1)
        assert s["MASTER_ADDR"] == "127.0.0.1" and int(s["MASTER_PORT"]) > 0
    assert len({s["hash"] for s in seen}) > 1, "one hash seed for all ranks hides set-ordered programs"


def test_each_run_has_a_group_of_its_own_size(ranks: Pool) -> None:
    for n in (2, 4, 1, 3, 3):
        for result in ranks.run(total, torch.ones(2), ranks=n):
            assert result.tolist() == [n * (n - 1) / 2] * 2


def test_a_run_leaves_no_state_to_the_next(ranks: Pool) -> None:
    def disturb() -> None:
        torch.manual_seed(17)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)

    before = ranks.run(surroundings, ranks=2)
    ranks.run(disturb, ranks=2)
    after = ranks.run(surroundings, ranks=2)
    for b, a in zip(before, after, strict=True):
        assert (b["random"], b["dtype"]) == (a["random"], a["dtype"])
    assert ranks.run(torch.is_grad_enabled, ranks=1) == [True]


def test_functions_and_results_travel_by_value(ranks: Pool) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    offset = 10
    results = ranks.run(lambda x: Local(x.value + offset + dist.get_rank()), Local(1), ranks=2)
    assert [r.value for r in results] == [11, 12]
    assert isinstance(results[0], Local)


def test_large_arguments_and_results(ranks: Pool) -> None:
    x = torch.arange(1_000_000.0)
    for y in ranks.run(lambda x: x + dist.get_rank(), x, ranks=2):
        assert y.shape == x.shape


def test_the_first_failure_is_raised_with_its_rank_and_traceback(ranks: Pool) -> None:
    def fail_on_one() -> None:
        if dist.get_rank() == 1:
            raise KeyError("the culprit")
        dist.barrier()  # for ever, as rank 1 never comes

    with pytest.raises(RankError, match="rank 1 of 3: KeyError: 'the culprit'") as caught:
        ranks.run(fail_on_one, ranks=3)
    assert "in fail_on_one" in str(caught.value) and "test_launch.py" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    assert ranks.run(dist.get_rank, ranks=3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os._exit(7), "the process exited with status 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process was killed by SIGKILL"),
        (lambda: sys.exit(3), "SystemExit: 3"),
    ],
    ids=["exit", "kill", "sys.exit"],
)
def test_a_rank_that_dies_is_named_and_replaced(ranks: Pool, end: Any, how: str) -> None:
    def die_on_two() -> None:
        dist.barrier()
        if dist.get_rank() == 2:
            end()
        dist.barrier()  # fails on the others, which must not be blamed

    with pytest.raises(RankError, match=f"rank 2 of 3: {how}"):
        ranks.run(die_on_two, ranks=3)
    assert ranks.run(dist.get_rank, ranks=3) == [0, 1, 2]


def test_an_error_on_every_rank_kills_none(ranks: Pool) -> None:
    def fail() -> None:
        raise ValueError("everywhere")

    before = ranks.run(os.getpid, ranks=3)
    with pytest.raises(RankError, match=r"of 3: ValueError: everywhere(.|\n)*failed after it"):
        ranks.run(fail, ranks=3)
    assert ranks.run(os.getpid, ranks=3) == before


def test_errors_that_do_not_pickle_still_arrive(ranks: Pool) -> None:
    class TwoArguments(Exception):
        def __init__(self, a: str, b: str) -> None:
            super().__init__(a + b)  # so that unpickling, which passes one argument, fails

    def fail() -> None:
        raise TwoArguments("no ", "way")

    with pytest.raises(RankError, match="TwoArguments: no way") as caught:
        ranks.run(fail, ranks=1)
    assert caught.value.__cause__ is None


def test_a_result_that_cannot_travel_is_an_error(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1: TypeError: cannot pickle"):
        ranks.run(lambda: (i for i in range(3)), ranks=1)


def test_a_timeout_names_the_ranks_and_where_they_are(ranks: Pool) -> None:
    def stuck() -> None:
        if dist.get_rank() != 1:
            dist.barrier()

    with pytest.raises(RankError, match=r"ranks 0, 2 of 3 had not finished after 1\.5 s") as caught:
        ranks.run(stuck, ranks=3, timeout=1.5)
    assert "dist.barrier()" in str(caught.value)
    assert ranks.run(dist.get_rank, ranks=3) == [0, 1, 2]


def test_wrong_sizes_are_refused(ranks: Pool) -> None:
    with pytest.raises(ValueError, match="8 ranks; 9 were asked for"):
        ranks.run(dist.get_rank, ranks=9)
    with pytest.raises(ValueError, match="at least one rank"):
        Pool(0)


def test_rank_count() -> None:
    assert [rank_count(g) for g in (3, (2, 2, 1), [5, 1, 1], Grid(1, 2, 3))] == [3, 4, 5, 6]


def test_launch_leaves_no_process_behind() -> None:
    pids = launch(os.getpid, grid=(1, 2, 1))
    assert len(set(pids)) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_launch_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """The script is not run again on the ranks, and its own functions and modules are found."""
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import beside
            import torch.distributed as dist
            from autopar3d.ranks.launch import launch

            print("once")

            def f(x):
                return dist.get_rank() + x + beside.VALUE

            print(launch(f, 10, grid=2))
            """
        )
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\n[15, 16]\n"


def test_the_end_of_the_parent_ends_its_ranks(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import os, time
        from pathlib import Path
        import torch.distributed as dist
        from autopar3d.ranks.launch import launch

        def hang():
            Path({str(tmp_path)!r}, str(os.getpid())).touch()
            if dist.get_rank() == 1:
                time.sleep(60)
            dist.barrier()

        launch(hang, grid=2)
        """
    )
    root = Path(__file__).parents[1]
    parent = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(root)})
    deadline = time.monotonic() + 120
    while len(pids := [int(p.name) for p in tmp_path.iterdir()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    for pid in pids:
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            assert time.monotonic() < deadline, f"rank {pid} outlived its parent"
            time.sleep(0.05)


config = {"size": 3}


def _names_like_torch_modules() -> int:
    return config["size"] * dist.get_world_size() if hasattr(torch, "distributed") else 0


def test_a_global_named_like_a_module_of_torch(ranks: Pool) -> None:
    import __main__
    from autopar3d.ranks import rank

    function = types.FunctionType(
        _names_like_torch_modules.__code__, {"config": config, "dist": dist, "torch": torch}, "by_value"
    )
    function.__module__ = __main__.__name__  # by value, as from a script
    assert pickle.loads(rank.dumps(torch.distributed.config)) is torch.distributed.config
    assert ranks.run(function, ranks=1) == [3]


@pytest.mark.parametrize("grid", [(2, 2), (2, 2, 0), "222"])
def test_a_grid_that_is_none_starts_nothing(grid: Any) -> None:
    with pytest.raises(GridError):
        launch(lambda: 1, grid=grid)


def _one_fails_one_stays() -> None:
    if dist.get_rank() == 0:
        raise ValueError("bad")
    time.sleep(60)


def test_every_rank_has_a_place_in_the_message(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 of 3: ValueError.*ranks 1, 2 had not finished, and were ended"):
        ranks.run(_one_fails_one_stays, ranks=3)
