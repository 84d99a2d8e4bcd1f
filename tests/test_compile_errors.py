"""Bad input: a clear error, on every rank, and no hang."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar3d
from autopar3d.errors import (
    AutoPar3DError,
    GridError,
    InputError,
    LaunchError,
    MismatchError,
    PlanError,
    StateError,
    TraceError,
)
from autopar3d.ranks.launch import Pool
from tests.test_module import GRID, Tied, close, make, rows


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return self.linear(x)


class Pair(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, x: Tensor, *, scale: Tensor, twice: bool = False) -> Tensor:
        return (self.linear(x) * scale * (2 if twice else 1)).sum()


# -- one process ---------------------------------------------------------------------------------------------


def test_compile_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(LaunchError, match=r"grid \(2, 2, 2\) needs 8 ranks.*torchrun --nproc-per-node.*launch"):
        autopar3d.compile(make(Tied), (2, 2, 2), rows())
    with pytest.raises(GridError, match="axis y has size 0"):
        autopar3d.compile(make(Tied), (2, 0, 2), rows())


def test_options_and_models_that_are_not_known() -> None:
    with pytest.raises(PlanError, match=r"model is a function; it must be an nn\.Module"):
        autopar3d.simulate(lambda x: x, GRID, rows())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="inputs='local' is not known"):
        autopar3d.simulate(make(Tied), GRID, rows(), inputs="local")
    with pytest.raises(PlanError, match="scheme"):
        autopar3d.simulate(make(Tied), GRID, rows(), scheme="4d")
    with pytest.raises(InputError, match="plan needs example_inputs="):
        autopar3d.plan(make(Tied), GRID)


def test_a_model_that_is_no_graph_names_its_line() -> None:
    with pytest.raises(TraceError, match=r"cannot trace Branches at test_compile_errors.py:\d+ \(`if x.sum\(\) > 0"):
        autopar3d.simulate(Branches().double(), GRID, rows())


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (
            (rows(8, 4),),
            {"scale": rows(8, 8)},
            r"args\[0\] is torch.float64 \(8, 4\); planned was torch.float64 \(8, 8",
        ),
        (
            (rows().float(),),
            {"scale": rows()},
            r"args\[0\] is torch.float32 \(8, 8\); planned was torch.float64 \(8, 8",
        ),
        ((rows(),), {}, r"kwargs\['scale'\] is missing; planned was torch.float64 \(8, 8\)"),
        ((rows(), rows()), {"scale": rows()}, r"args\[1\] is torch.float64 \(8, 8\); nothing was planned there"),
        ((rows(),), {"scale": "two"}, r"kwargs\['scale'\] is 'two'; planned was torch.float64"),
        ((rows().to("meta"),), {"scale": rows()}, r"input args\[0\] is on meta, the parameters are on cpu"),
    ],
)
def test_calls_that_do_not_fit_name_the_input(args: Any, kwargs: Any, text: str) -> None:
    par = autopar3d.simulate(make(Pair), GRID, rows(), {"scale": rows()})
    with pytest.raises(InputError, match=text):
        par(*args, **kwargs)
    # Another value of what is no tensor is another plan.
    one, two = par(rows(), scale=rows()), par(rows(), scale=rows(), twice=True)
    close(two, 2 * one)


def test_check_compares_the_graph_with_the_model() -> None:
    class Lucky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * random.random()

    with pytest.raises(TraceError, match="graph of Lucky does not compute what the model does.*differ by up to"):
        autopar3d.simulate(make(Lucky), GRID, rows(), check=True)
    from tests.test_module import Two

    model = make(Two)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    autopar3d.simulate(model, GRID, rows(), check=True)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name
    assert torch.equal(torch.get_rng_state(), state)
    autopar3d.simulate(
        nn.Linear(8, 8).double(), GRID, rows(), {"targets": (rows(),)}, loss_fn=nn.functional.mse_loss, check=True
    )


class Reads(nn.Module):
    """Reads a number from a tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        if self.how == "returns":
            return h, h.sum().item()
        if self.how == "uses":
            return h * h.sum().item()
        return h[:, : int(x.sum())]


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 512, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(ids)), labels)


def _meta_attribute() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
        model.table = torch.ones(8)
    return model


REFUSED: dict[str, tuple[type[Exception], Any, str]] = {
    "another dtype": (
        TraceError,
        lambda: autopar3d.simulate(nn.Linear(8, 8), GRID, rows()),
        r"Linear multiplies tensors of different dtypes .*args\[0\] torch.float64, weight torch.float32",
    ),
    "kwargs as a list": (
        InputError,
        lambda: autopar3d.simulate(nn.Linear(8, 8), GRID, rows(), [rows()]),  # type: ignore[arg-type]
        "example_kwargs= is a list; it must be a dict",
    ),
    "targets without loss_fn": (
        InputError,
        lambda: autopar3d.simulate(nn.Linear(8, 8), GRID, rows(), {"targets": (rows(),)}),
        "targets= was passed, but there is no loss to use them: give compile loss_fn=",
    ),
    "loss_fn without targets": (
        InputError,
        lambda: autopar3d.simulate(nn.Linear(8, 8), GRID, rows(), loss_fn=nn.functional.mse_loss),
        r"loss_fn mse_loss\(.*is called as loss_fn\(output, \*targets\), here with 0 targets",
    ),
    "targets as a list": (
        InputError,
        lambda: autopar3d.simulate(make(Tied), GRID, rows(), {"targets": [rows()]}, loss_fn=nn.functional.mse_loss),
        "targets= got a list; pass a tuple",
    ),
    "returns a number": (
        TraceError,
        lambda: autopar3d.simulate(Reads("returns").double(), GRID, rows()),
        r"returns a number that it read from a tensor \(output\[1\]\), as .item\(\) does",
    ),
    "computes with a number": (
        TraceError,
        lambda: autopar3d.simulate(Reads("uses").double(), GRID, rows()),
        r"Reads, at test_compile_errors.py:\d+, computes with a number that was read from a tensor",
    ),
    "names the module": (
        TraceError,
        lambda: autopar3d.simulate(
            nn.Sequential(nn.Linear(8, 8), Branches()).double(),
            GRID,
            rows(),
        ),
        r"cannot trace Sequential, in 1 \(Branches\) at test_compile_errors.py:.*: the model's Python depends",
    ),
    "an attribute on meta": (
        TraceError,
        lambda: autopar3d.plan(_meta_attribute(), GRID, torch.empty(8, 8, device="meta")),
        "table is a plain tensor attribute on meta, which has no values.*register_buffer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_message_says_what_to_change(name: str) -> None:
    error, call, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()


def test_torch_says_nothing_before_us(capfd: pytest.CaptureFixture[str]) -> None:
    class Talks(Reads):
        def forward(self, x: Tensor) -> Any:
            print("the model's own words", file=sys.stderr)
            return super().forward(x)

    with pytest.raises(TraceError):
        autopar3d.simulate(Talks("slices").double(), GRID, rows())
    printed = capfd.readouterr()
    assert printed.err.strip() == "the model's own words" and not printed.out


def test_labels_out_of_range_raise_as_on_one_device() -> None:
    torch.manual_seed(0)
    ids, labels = torch.randint(64, (8,)), torch.randint(512, (8,))
    labels[3] = -100
    model = Labelled()
    par = autopar3d.simulate(model, (1, 4, 1), (ids, labels))
    assert torch.allclose(par(ids, labels), model(ids, labels), atol=1e-5)
    for module in (model, par):
        with pytest.raises(IndexError, match="out of (bounds|range)"):
            module(ids, labels.clamp(min=0) + 500)


def test_ops_of_the_whole_call_have_stable_names() -> None:
    par = autopar3d.simulate(make(Tied), GRID, rows())
    shown = [repr(node.target) for node in par.graph.nodes if node.op == "call_function"]
    assert "forward_and_backward" in shown and not any(" at 0x" in text for text in shown)


# -- real ranks ----------------------------------------------------------------------------------------------


def _refusals() -> dict[str, str]:
    rank = dist.get_rank()
    found: dict[str, str] = {}

    def refused(what: str, error: type[Exception], call: Any) -> None:
        with pytest.raises(error) as caught:
            call()
        found[what] = f"{type(caught.value).__name__}: {caught.value}"

    refused("size", GridError, lambda: autopar3d.compile(make(Tied), (2, 2, 2), rows()))
    refused("grids", MismatchError, lambda: autopar3d.compile(make(Tied), (2, 2, 1) if rank else (1, 4, 1), rows()))
    refused(
        "option",
        PlanError if rank == 2 else MismatchError,
        lambda: autopar3d.compile(make(Tied), GRID, rows(), inputs="mine" if rank == 2 else "global"),
    )
    refused(
        "trace",
        TraceError if rank == 3 else MismatchError,
        lambda: autopar3d.compile(Branches().double() if rank == 3 else make(Tied), GRID, rows()),
    )
    refused("everywhere", TraceError, lambda: autopar3d.compile(Branches().double(), GRID, rows()))
    refused(
        "models",
        MismatchError,
        lambda: autopar3d.compile(make(Pair, 16 if rank == 1 else 8), GRID, rows(), {"scale": torch.ones(1).double()}),
    )
    par = autopar3d.compile(make(Pair), GRID, rows(), {"scale": rows()}, check=True)
    refused("inputs", InputError, lambda: par(rows(), scale=rows(seed=7 if rank == 1 else 1)))
    refused("shapes", InputError, lambda: par(rows(16 if rank == 1 else 8), scale=rows()))
    refused("structure", InputError, lambda: par(rows(), scale=rows()) if rank else par(rows()))
    refused("call", InputError, lambda: par(rows(8, 4), scale=rows()))
    flags = {"scale": rows()} if rank else {"scale": rows(), "twice": True}
    refused("flags", InputError, lambda: par(rows(), **flags))
    sharded = autopar3d.compile(make(Tied), GRID, inputs="sharded")
    refused("sharded", InputError, lambda: sharded(rows()))
    refused("unplanned", StateError, lambda: sharded.state_dict())
    # After all that the ranks still work together.
    close(par(rows(), scale=rows()), make(Pair)(rows(), scale=rows()))
    return found


def test_every_rank_gets_a_clear_error(ranks: Pool) -> None:
    results = ranks.run(_refusals, ranks=4, timeout=200)
    for rank, found in enumerate(results):
        assert "needs 2*2*2 = 8 ranks but the world size is 4" in found["size"] and "(2, 2, 1)" in found["size"]
        assert "compile of rank 0 differs from that of ranks 1, 2, 3" in found["grids"]
        if rank != 2:
            assert "compile failed on rank 2: PlanError: inputs='mine' is not known" in found["option"]
        if rank != 3:
            assert "planning failed on rank 3: TraceError: cannot trace Branches at" in found["trace"]
        assert "cannot trace Branches" in found["everywhere"]
        assert "planning of rank 0 differs from that of rank 1" in found["models"]
        assert "input kwargs['scale'] of rank 0 differs from that of rank 1" in found["inputs"]
        assert "same global batch" in found["inputs"]
        assert "input args[0] of rank 0 differs from that of rank 1 ((8, 8) torch.float64" in found["shapes"]
        assert "inputs of rank 0 differs from that of ranks 1, 2, 3" in found["structure"]
        assert "args[0] is torch.float64 (8, 4); planned was" in found["call"]
        assert "of rank 0 differs from that of ranks 1, 2, 3" in found["flags"]
        assert "give compile example_inputs= of global shape" in found["sharded"]
        assert "nothing is planned yet" in found["unplanned"]


# What an argument of `plan` may not be, and what the message says; several are told together.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": nn.Linear}, "model is a type; .* make one of it first"),
    ({"loss_fn": nn.MSELoss}, r"loss_fn= is the class MSELoss; pass an object of it, as MSELoss\(\)"),
    ({"loss_fn": "mse"}, r"loss_fn= is a str; .*loss_fn\(output, \*targets\)"),
    ({"outputs": None, "strict": "yes"}, "(?s)strict='yes' .*True or False.*outputs=None .*auto, global"),
    ({"outputs": {0: "global"}}, "names 0; names are text"),
    ({"constraints": "weight"}, "constraints= is a str; it must be a dict"),
    ({"constraints": {"weight": 5}}, "'weight': 5 is no glob with a layout"),
    ({"memory_budget": "80GB"}, "memory_budget='80GB': .*bytes per device, as in 80e9"),
    ({"memory_budget": float("nan")}, "memory_budget=nan"),
    ({"hardware": 5}, "hardware= is a int"),
    ({"plan": "plan.json", "seed": -1, "check": "x"}, r"(?s)Plan.load\(path\).*check='x'.*seed=-1"),
    ({"world_size": "8"}, "world_size='8'"),
    ({"world_size": 0}, "world_size=0"),
    ({"example_inputs": (torch.ones(2, 2),) * 2}, r"Linear.forward\(input\) .*\(args\[0\], args\[1\]\): too many"),
    ({"example_inputs": {"input": torch.ones(2, 2)}, "example_kwargs": {"a": 1}}, "goes into example_kwargs="),
    ({"example_kwargs": {1: 1}}, "has the key 1"),
    ({"example_inputs": torch.ones(8, 8).numpy()}, r"numpy array \(args\[0\]\); .*torch.as_tensor"),
    ({"example_inputs": torch.ones(8, 8).to_sparse()}, r"sparse tensor \(args\[0\], torch.sparse_coo\)"),
    ({"example_inputs": torch.ones(8, 8).long()}, r"different dtypes .*args\[0\] torch.int64"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG, ids=lambda v: "-".join(v) if isinstance(v, dict) else "")
def test_an_argument_of_the_wrong_kind_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(AutoPar3DError, match=says):
        autopar3d.plan(**{"model": nn.Linear(8, 8), "grid": (2, 1, 1), "example_inputs": torch.ones(8, 8), **wrong})


def test_wrong_calls_of_a_module_and_its_tools_are_named() -> None:
    par = autopar3d.simulate(nn.Linear(8, 8), (2, 1, 1), torch.ones(8, 8))
    optimizer = torch.optim.SGD(par.parameters(), 0.1)
    wrong: list[tuple[Any, str]] = [
        (lambda: autopar3d.simulate(par, (2, 1, 1), torch.ones(8, 8)), "compiled already"),
        (lambda: autopar3d.collectives(par), "par.forward_graph or par.backward_graph"),
        (lambda: par.load_state_dict(None), "load_state_dict got a NoneType"),  # type: ignore[arg-type]
        (lambda: par.load_full_optim_state_dict(optimizer, {"a": 1}), "'param_groups'.* this has the keys a"),
        (lambda: par.set_random_state({}), r"random_state\(\) gave"),
        (lambda: par.plan.explain(5), "explain got a int"),  # type: ignore[arg-type]
        (lambda: par.plan.diff(5), "diff got a int"),  # type: ignore[arg-type]
        (lambda: autopar3d.launch(None, grid=2), "fn is a NoneType"),  # type: ignore[arg-type]
        (lambda: autopar3d.launch(print, grid=0), "at least one"),
        (lambda: autopar3d.launch(print, grid=(100, 100, 100)), "1000000 processes .*simulate need no processes"),
        (lambda: autopar3d.launch(print, grid=2, timeout=0), "timeout=0"),
        (lambda: autopar3d.launch(lambda _: 0, threading.Lock(), grid=2), "cannot pickle .*lock"),
    ]
    for call, says in wrong:
        with pytest.raises(AutoPar3DError, match=says):
            call()
