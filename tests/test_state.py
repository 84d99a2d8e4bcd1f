"""State on real ranks: what goes in and out of a parallel module, meta models, calls of several kinds."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor

import autopar3d
from autopar3d.errors import StateError
from autopar3d.ranks.launch import Pool
from autopar3d.running.initialize import initial_values
from tests import models
from tests.test_module import GRID, Colliding, Record, Two, close, make, rows

CUBE = (2, 2, 2)


class Net(nn.Module):
    """Tied weights, running statistics, a buffer that is not saved, and a parameter that is not trained."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(8, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.mid = nn.Linear(width, 8)
        self.out = nn.Linear(8, width, bias=False)
        self.out.weight = self.inp.weight
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mid(self.norm(self.inp(x))))
        return (self.out(x) * self.scale + self.frozen).square().mean()


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    decayed = [p for p in named.values() if p.requires_grad and p.dim() > 1]
    others = [p for p in named.values() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def steps(module: nn.Module, opt: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        opt.zero_grad()
        loss = module(rows(seed=seed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return losses


def trained(count: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(Net)
    opt = optimizer(model)
    steps(model, opt, range(count))
    return model, opt


def same_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert type(got[name]) is Tensor and got[name].device.type == "cpu", name
        close(got[name], value)


# -- load_state_dict, in simulation --------------------------------------------------------------------------


def test_state_dicts_speak_the_models_names() -> None:
    par, model = autopar3d.simulate(make(Net), GRID, rows()), make(Net)
    same_state(par.full_state_dict(), model.state_dict())
    assert list(par.state_dict(prefix="net.")) == [f"net.{n}" for n in model.state_dict()]
    full = par.full_state_dict()
    assert full["out.weight"] is full["inp.weight"]
    assert par.out.weight is par.inp.weight
    # What comes out shares nothing with what is held.
    full["mid.bias"].add_(1)
    same_state(par.full_state_dict(), model.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_loading_copies_into_what_is_held(assign: bool) -> None:
    par = autopar3d.simulate(make(Net), GRID, rows())
    held = dict(par.named_parameters())
    model, _ = trained()
    given = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in model.state_dict().items()}
    assert not given["mid.weight"].is_contiguous()
    result = par.load_state_dict(given, assign=assign)
    assert result.missing_keys == [] and result.unexpected_keys == []
    same_state(par.full_state_dict(), model.state_dict())
    for name, p in par.named_parameters():
        assert p is held[name] and p.is_contiguous() and p.requires_grad == (name != "frozen")
    del given["out.weight"]  # tied: one of its names is enough
    par.load_state_dict(given, assign=assign)


def test_what_does_not_fit_is_listed_and_changes_nothing() -> None:
    par, before = autopar3d.simulate(make(Net), GRID, rows()), make(Net).state_dict()
    given: dict[str, Any] = trained()[0].state_dict()
    given["mid.weight"] = torch.zeros(16, 8)
    given["norm.bias"] = torch.zeros(1)
    given["other"] = torch.zeros(1)
    given["scale"] = torch.zeros(16)
    del given["frozen"]
    with pytest.raises(StateError) as error:
        par.load_state_dict(given)
    text = str(error.value)
    assert "mid.weight: the dict has shape (16, 8), the model (8, 16)" in text
    assert "norm.bias: the dict has shape (1,), the model (16,)" in text
    assert "missing: frozen" in text and "unexpected: other, scale" in text
    same_state(par.full_state_dict(), before)
    given = {"frozen": torch.full((16,), 2.0), "more": torch.zeros(1)}
    result = par.load_state_dict(given, strict=False)
    assert result.unexpected_keys == ["more"] and "mid.weight" in result.missing_keys
    close(par.frozen, torch.full((16,), 2.0).double())
    with pytest.raises(StateError, match=r"frozen: .* torch.float32, the model torch.float64"):
        par.load_state_dict({"frozen": torch.zeros(16)}, strict=False, assign=True)
    with pytest.raises(StateError, match="meta tensor"):
        par.load_state_dict({"frozen": torch.zeros(16, device="meta")}, strict=False)
    with pytest.raises(StateError, match="frozen: the dict has a list"):
        par.load_state_dict({"frozen": [1.0]}, strict=False)


def test_optimizer_state_goes_both_ways() -> None:
    model, opt = trained()
    par = autopar3d.simulate(make(Net), GRID, rows())
    mine = optimizer(par)
    par.load_state_dict(model.state_dict())
    par.load_full_optim_state_dict(mine, opt.state_dict())
    close(steps(par, mine, range(2, 4)), steps(model, opt, range(2, 4)))
    again, fresh = make(Net), None
    fresh = optimizer(again)
    again.load_state_dict(par.full_state_dict())
    fresh.load_state_dict(par.full_optim_state_dict(mine))
    close(steps(again, fresh, range(4, 6)), steps(model, opt, range(4, 6)))
    wrong = copy.deepcopy(opt.state_dict())
    wrong["state"][0]["exp_avg"] = torch.zeros(4, 8)
    with pytest.raises(StateError, match=r"exp_avg of inp.weight has shape \(4, 8\), the parameter \(16, 8\)"):
        par.load_full_optim_state_dict(mine, wrong)
    with pytest.raises(StateError, match=r"\[2, 3\] parameters, .* \[6\]"):
        plain = torch.optim.SGD(make(Net).parameters(), lr=1.0)
        par.load_full_optim_state_dict(mine, plain.state_dict())


# -- meta models, in simulation ------------------------------------------------------------------------------


def on_meta(cls: type[nn.Module] = Net, *args: Any) -> nn.Module:
    with torch.device("meta"):
        return cls(*args).double()


class Filled(Net):
    """A model whose parameters all have an initialiser."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.scale = torch.full((width,), 0.5, device="cpu", dtype=torch.float64)
        self.scale.requires_grad_(False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.frozen)
        nn.init.trunc_normal_(self.mid.weight, std=0.1)


def test_a_meta_model_is_initialised_the_same_on_every_grid() -> None:
    one = autopar3d.simulate(on_meta(Filled), (1, 1, 1), rows())
    full = one.full_state_dict()
    for grid in (CUBE, (1, 4, 1)):
        same_state(autopar3d.simulate(on_meta(Filled), grid, rows()).full_state_dict(), full)
    assert 0.05 < full["mid.weight"].std() < 0.15  # of reset_parameters above, not of nn.Linear
    assert 0.1 < full["inp.weight"].std() < 0.3 and full["frozen"].eq(1).all()
    assert full["inp.weight"] is full["out.weight"] and full["norm.running_var"].eq(1).all()
    other = autopar3d.simulate(on_meta(Filled), GRID, rows(), seed=1).full_state_dict()
    assert not torch.equal(other["mid.weight"], full["mid.weight"])
    opt = optimizer(one)
    losses = steps(one, opt, range(3))
    assert losses[-1] < losses[0]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    autopar3d.simulate(on_meta(Filled), GRID, rows())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_meta_model_without_values_says_what_is_missing() -> None:
    par = autopar3d.simulate(on_meta(), GRID, rows())
    with pytest.raises(StateError, match="2 tensors of a meta model have no values: frozen, scale"):
        par(rows())
    par.get_buffer("scale").fill_(0.5)
    assert par.get_buffer("norm.num_batches_tracked") == 0
    with pytest.raises(StateError, match="1 tensors of a meta model have no values: frozen"):
        par(rows())
    twin = copy.deepcopy(par)
    with pytest.raises(StateError, match="no values: frozen"):
        twin(rows())
    model = make(Net)
    par.load_state_dict(model.state_dict(), assign=True)
    close(par(rows()), model(rows()))
    with torch.no_grad():
        twin.state_dict()["frozen"].fill_(1.0)  # as torch.distributed.checkpoint.load writes
    twin(rows()).backward()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_huggingface_models_are_initialised_as_their_constructor_does(name: str) -> None:
    build = getattr(models, f"_{name}")
    real = build()
    with torch.device("meta"):
        model = build()
    made = {n: (t.clone(), written) for n, t, written in initial_values(model, torch.device("cpu"), seed=0)}
    for path, tensor in (*real.named_parameters(), *real.named_buffers()):
        tensor, (got, written) = tensor.detach(), made[path]
        assert written and got.shape == tensor.shape, path
        if tensor.is_floating_point() and tensor.numel() > 1000:
            assert 0.8 < float(got.std() / tensor.std()) < 1.25, path
        elif not tensor.is_floating_point() or float(tensor.std()) == 0:
            assert torch.equal(got, tensor), path


# -- real ranks ----------------------------------------------------------------------------------------------


def _save(grid: tuple[int, int, int], folder: str) -> Any:
    torch.manual_seed(dist.get_rank())
    par = autopar3d.compile(make(Net) if dist.get_rank() == 0 else Net().double(), grid, rows())
    opt = optimizer(par)
    losses = steps(par, opt, range(2))
    # torch's own helpers, as users of FSDP know them.
    model_state, optim_state = dcp_state.get_state_dict(par, opt)
    assert list(model_state) == list(make(Net).state_dict())
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=f"{folder}/helpers")
    dcp.save({"model": par.state_dict(), "optim": opt.state_dict()}, checkpoint_id=f"{folder}/plain")
    full, full_optim = par.full_state_dict(), par.full_optim_state_dict(opt)
    losses += steps(par, opt, range(2, 4))
    return losses, full, full_optim, [isinstance(p, DTensor) for p in par.parameters()]


def _resume(grid: tuple[int, int, int], ways: list[str], folder: str, full: Any, full_optim: Any) -> Any:
    found = {}
    for way in ways:
        # A meta model: without the checkpoint it has no values of its own.
        par = autopar3d.compile(on_meta() if way == "helpers" else Net().double(), grid, rows())
        par.get_buffer("scale").fill_(0.5)
        opt = optimizer(par)
        if way == "helpers":
            model_state, optim_state = dcp_state.get_state_dict(par, opt)
            dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=f"{folder}/helpers")
            dcp_state.set_state_dict(par, opt, model_state_dict=model_state, optim_state_dict=optim_state)
        elif way == "plain":
            dcp_state._init_optim_state(opt)
            state = {"model": par.state_dict(), "optim": opt.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/plain")
            par.load_state_dict(state["model"])
            opt.load_state_dict(state["optim"])
        else:
            par.load_state_dict(full, assign=True)
            par.load_full_optim_state_dict(opt, full_optim)
            assert all(isinstance(p, DTensor) for p in par.parameters())
        assert par.out.weight is par.inp.weight
        found[way] = steps(par, opt, range(2, 4)), par.full_state_dict()
    return found


def test_checkpoints_resume_on_any_grid(ranks: Pool, tmp_path: Path) -> None:
    model, opt = trained()
    middle, middle_optim = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    again = make(Net)
    losses = steps(again, optimizer(again), range(2)) + steps(model, opt, range(2, 4))
    results = ranks.run(_save, CUBE, str(tmp_path), ranks=8)
    for got, full, full_optim, sharded in results:
        close(got, losses)
        same_state(full, middle)
        assert all(sharded)
        assert list(full_optim["state"]) == list(middle_optim["state"])
        assert full_optim["param_groups"] == middle_optim["param_groups"]
        close(full_optim["state"], middle_optim["state"])
    _, full, full_optim, _ = results[0]
    # The plain model and optimizer load what came out.
    plain = Net().double()
    plain.load_state_dict(full)
    plain_opt = optimizer(plain)
    plain_opt.load_state_dict(copy.deepcopy(full_optim))  # torch shares the tensors
    close(steps(plain, plain_opt, range(2, 4)), losses[2:])
    all_ways = ["helpers", "plain", "full"]
    for grid, ways in (((1, 2, 4), ["helpers"]), ((4, 1, 1), all_ways), ((1, 1, 1), all_ways)):
        count = autopar3d.Grid(*grid).size
        for found in ranks.run(_resume, grid, ways, str(tmp_path), full, full_optim, ranks=count):
            for way, (got, state) in found.items():
                close(got, losses[2:]), way
                same_state(state, model.state_dict())
    # In simulation, and in the plain model, from the same files.
    par = autopar3d.simulate(Net().double(), CUBE, rows())
    for target in (par, Net().double()):
        fresh = optimizer(target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no process group here: DCP says that it works alone
            state, optim = dcp_state.get_state_dict(target, fresh)
            dcp.load({"model": state, "optim": optim}, checkpoint_id=f"{tmp_path}/helpers")
            dcp_state.set_state_dict(target, fresh, model_state_dict=state, optim_state_dict=optim)
        close(steps(target, fresh, range(2, 4)), losses[2:])


def _calls() -> dict[str, Any]:
    """Many checks of one kind of call each, to start the ranks once."""
    torch.manual_seed(100 + dist.get_rank())
    done: dict[str, Any] = {}
    logged = _Logged()
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(logged)
    # Rank 0's weights reach all ranks.
    par = autopar3d.compile(Two().double(), GRID, rows())
    first = {n: t.clone() for n, t in par.full_state_dict().items()}
    done["weights"] = first
    ref = Two().double()
    ref.load_state_dict(first)
    # One of two outputs; no_grad; other shapes; a part in eval; a frozen parameter.
    ref.zero_grad()
    for i in (0, 1, 1):
        par.zero_grad()
        ref.zero_grad()
        par(rows())[i].sum().backward()
        ref(rows())[i].sum().backward()
        _same(par, ref)
    with torch.no_grad():
        close(par(rows(16)), ref(rows(16)))
    with torch.inference_mode():
        close(par(rows(16)), ref(rows(16)))
    for m in (par, ref):
        m.zero_grad()
        m.norm.eval()
        m.a.weight.requires_grad_(False)
        sum(o.square().sum() for o in m(rows(16))).backward()
    _same(par, ref)
    for (_, b), c in zip(par.named_buffers(), ref.buffers(), strict=True):
        close(b, c)
    # A copy that trains on its own.
    twin, ref_twin = copy.deepcopy(par), copy.deepcopy(ref)
    for m in (twin, ref_twin):
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        m(rows())[0].sum().backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        opt.step()
    for (n, p), (_, q) in zip(twin.full_state_dict().items(), ref_twin.state_dict().items(), strict=True):
        close(p, q), n
    for n, p in par.full_state_dict().items():
        close(p, ref.state_dict()[n])
    with pytest.raises(StateError, match="pickled"):
        copy_of = torch.save(par, "/dev/null")
        del copy_of
    # Loading sharded values of another layout, of DTensors on the module's own mesh, and non-contiguous ones.
    other = autopar3d.compile(Two().double(), GRID, rows(), scheme="zero3")
    other.load_state_dict(par.state_dict())
    _same_values(other, ref.state_dict())
    other.load_state_dict({n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in first.items()})
    _same_values(other, first)
    # Colliding names.
    odd = autopar3d.compile(make(Colliding), GRID, rows())
    _same_values(odd, make(Colliding).state_dict())
    close(odd(rows()), make(Colliding)(rows()))
    logging.getLogger("torch.distributed.tensor._redistribute").removeHandler(logged)
    assert logged.lines == []
    return done


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _same(par: nn.Module, ref: nn.Module) -> None:
    for (name, p), (other, q) in zip(par.named_parameters(), ref.named_parameters(), strict=True):
        assert name == other and (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            close(p.grad.full_tensor(), q.grad)


def _same_values(par: Any, want: dict[str, Tensor]) -> None:
    for name, value in par.full_state_dict().items():
        close(value, want[name]), name


def test_calls_on_ranks(ranks: Pool) -> None:
    results = ranks.run(_calls, ranks=4)
    for result in results:
        same_state(result["weights"], results[0]["weights"])


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Record:
        logits = self.down(torch.tanh(self.up(x)))
        loss = nn.functional.cross_entropy(logits, labels)
        return Record(loss, {"logits": logits, "best": logits.argmax(-1)}, 2)


LABELS = torch.arange(8)


def _outputs_and_inputs() -> None:
    rank = dist.get_rank()
    ref = make(Logits)
    want = ref(rows(), LABELS)
    (want.loss + 0.1 * want.parts["logits"].square().sum()).backward()
    for outputs in ("auto", "global", {"logits": "global"}, "sharded"):
        par = autopar3d.compile(make(Logits), GRID, (rows(), LABELS), outputs=outputs)
        got = par(rows(), LABELS)
        logits = got.parts["logits"]
        assert isinstance(logits, DTensor) == (outputs in ("auto", "sharded")) and got.count == 2
        close(got.loss, want.loss)
        full = logits.full_tensor() if isinstance(logits, DTensor) else logits
        close(full, want.parts["logits"])
        # Through the DTensor itself, and through what is gathered from it.
        extra = logits.square().sum() if outputs == "auto" else full.square().sum()
        extra = extra.full_tensor() if isinstance(extra, DTensor) else extra
        (got.loss + 0.1 * extra).backward()
        _same(par, ref)
    ref.zero_grad()
    ref(rows(), LABELS).loss.backward()
    par = autopar3d.compile(make(Logits), GRID, (rows(), LABELS), outputs="loss")
    got = par(rows(), LABELS)
    assert got.parts == {"logits": None, "best": None}
    got.loss.backward()
    _same(par, ref)
    # Each rank its own part.
    par = autopar3d.compile(make(Logits), GRID, (rows(), LABELS), inputs="sharded", check=True)
    grid = autopar3d.Grid(*GRID)
    x, labels = (
        layout.shard(t, grid, rank) for layout, t in zip(par.input_layouts.values(), (rows(), LABELS), strict=True)
    )
    assert list(par.input_layouts) == ["args[0]", "args[1]"]
    assert all(not axes for layout in par.input_layouts.values() for ((_, axes),) in layout.dims[1:])
    got = par(x, labels)
    close(got.loss, want.loss)
    got.loss.backward()
    _same(par, ref)


def test_outputs_and_sharded_inputs_on_ranks(ranks: Pool) -> None:
    ranks.run(_outputs_and_inputs, ranks=4)


class Wide(nn.Module):
    """Some 200 MB, on meta."""

    def __init__(self, layers: int = 24, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).unflatten(-1, (2, -1)).mean(-2)
        return x.sum()


def _peak() -> int:
    """Bytes of this process's largest resident set since `_reset_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def _reset_peak() -> None:
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _compile_wide() -> tuple[int, int, Tensor]:
    with torch.device("meta"):
        model = Wide()
    x = torch.randn(8, 1024)
    # What compiling itself needs, beside tensors: once for a small model of the same graph.
    with torch.device("meta"):
        small = Wide(width=16)
    autopar3d.compile(small, CUBE, torch.randn(8, 16))
    _reset_peak()
    before = _peak()
    par = autopar3d.compile(model, CUBE, x)
    grown = _peak() - before
    local = sum(p.to_local().numel() for p in par.parameters())
    return grown, local, par.layers[3].weight.full_tensor()[:4, :4]


@pytest.mark.slow
def test_no_rank_ever_holds_a_whole_meta_model(ranks: Pool) -> None:
    size = 24 * 1024 * 2048
    results = ranks.run(_compile_wide, ranks=8)
    for grown, local, _ in results:
        assert local * 8 == size
        # Its shards, and one module's tensors with room for what makes the random numbers.
        assert grown < 0.3 * 4 * size, f"{grown / 2**20:.0f} MiB"
    with torch.device("meta"):
        one = autopar3d.simulate(Wide(), (1, 1, 1), torch.randn(8, 1024, device="meta"))
    close(results[5][2], one.layers[3].weight[:4, :4])
