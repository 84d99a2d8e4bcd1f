"""The parallel module as users meet it: calling, outputs, re-planning, copies. In simulation; ranks: test_state."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar3d
from autopar3d import compiler
from autopar3d.errors import InputError, PlanError, StateError

GRID = (2, 1, 2)


class Two(nn.Module):
    """Two heads on one trunk, with dropout and a norm that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.a = nn.Linear(16, 8)
        self.b = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.trunk(x))
        return self.a(F.relu(x)), self.b(x)


def make(cls: type[nn.Module] = Two, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return cls(*args).double()


def rows(n: int = 8, width: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def same_gradients(par: nn.Module, ref: nn.Module) -> None:
    for (name, p), (other, q) in zip(par.named_parameters(), ref.named_parameters(), strict=True):
        assert name == other
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            close(p.grad, q.grad)


@contextmanager
def counted_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Appends a number at each planning."""
    plans: list[int] = []
    original = compiler.Compiler.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        plans.append(len(plans))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(compiler.Compiler, "step", step)
    yield plans
    monkeypatch.undo()


# -- modes, shapes, requires_grad ----------------------------------------------------------------------------


def test_new_shapes_modes_and_flags_are_planned_once_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    ref = make()
    with counted_plans(monkeypatch) as plans:
        par = autopar3d.simulate(make(), GRID, rows())
        layouts = {p.names: p.layout for p in getattr(par.plan, "parameters", ())}

        def check(x: Tensor, expected: int) -> None:
            for m in (par, ref):
                m.zero_grad()
                a, b = m(x)
                (a.sum() + (b * b).sum()).backward()
            same_gradients(par, ref)
            for (name, p), q in zip(par.named_buffers(), ref.buffers(), strict=True):
                close(p, q), name
            assert len(plans) == expected

        check(rows(), 1)
        check(rows(seed=2), 1)
        check(rows(16), 2)
        for m in (par, ref):
            m.get_submodule("norm").eval()
        check(rows(), 3)
        for m in (par, ref):
            m.eval()
        check(rows(), 4)
        for m in (par, ref):
            m.train()
        check(rows(), 4)
        for m in (par, ref):
            m.get_parameter("trunk.weight").requires_grad_(False)
            m.get_parameter("a.bias").requires_grad_(False)
        check(rows(), 5)
        assert par.get_parameter("trunk.weight").grad is None
        assert {p.names: p.layout for p in getattr(par.plan, "parameters", ())} == layouts
        for m in (par, ref):
            m.get_parameter("trunk.weight").requires_grad_(True)
            m.get_parameter("a.bias").requires_grad_(True)
        check(rows(), 5)
        check(rows(16), 5)


def test_without_gradients_nothing_is_kept() -> None:
    par, ref = autopar3d.simulate(make(), GRID, rows()), make()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(par(rows()), ref(rows()))
            assert not par(rows())[0].requires_grad
            ref(rows())
    for p in par.parameters():
        p.requires_grad_(False)
    assert not par(rows())[0].requires_grad
    close(dict(par.named_buffers())["norm.running_mean"].sum(), par.get_buffer("norm.running_mean").sum())


def test_an_input_gets_its_gradient() -> None:
    par, ref = autopar3d.simulate(make(), GRID, rows().requires_grad_()), make()
    x, y = rows().requires_grad_(), rows().requires_grad_()
    par(x)[0].sum().backward()
    ref(y)[0].sum().backward()
    assert x.grad is not None and y.grad is not None
    close(x.grad, y.grad)


def test_a_buffer_that_forward_reads_and_changes() -> None:
    class Decay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.full((8,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            out = (self.linear(x) * self.scale).sum()
            self.scale = self.scale * 0.5
            return out

    par, ref = autopar3d.simulate(make(Decay), GRID, rows()), make(Decay)
    held = par.state_dict()["scale"]
    for _ in range(2):
        par(rows()).backward()
        ref(rows()).backward()
    same_gradients(par, ref)
    close(held, ref.get_buffer("scale"))


# -- where gradients come from -------------------------------------------------------------------------------


def test_gradients_from_some_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = compiler.Compiler.with_seeds
    monkeypatch.setattr(compiler.Compiler, "with_seeds", lambda *args: made.append(args[2]) or original(*args))
    par, ref = autopar3d.simulate(make(), GRID, rows()), make()
    for i in (0, 0, 1, 1, 0):
        for m in (par, ref):
            m.zero_grad()
            m(rows())[i].sum().backward()
        same_gradients(par, ref)
    assert made == [(0,), (1,)]
    assert par.get_parameter("a.weight").grad is not None and par.get_parameter("b.weight").grad is None
    # From the second step on, the graphs that are shown run, and run once.
    runs: list[Any] = []
    executor = par.__dict__["_ap3d"].engine.executor
    run = executor.run
    executor.run = lambda graph, values, **how: runs.append(graph) or run(graph, values, **how)
    par(rows())[0].sum().backward()
    assert runs == [par.forward_graph, par.backward_graph]


def test_a_second_backward_needs_the_graph_to_be_retained() -> None:
    par = autopar3d.simulate(make(), GRID, rows())
    loss = par(rows())[0].sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in par.named_parameters() if p.grad is not None}
    loss.backward()
    assert once and all(torch.allclose(par.get_parameter(name).grad, 2 * g) for name, g in once.items())
    with pytest.raises(StateError, match="second time"):
        loss.backward()


def test_parameters_changed_before_backward_are_refused() -> None:
    par = autopar3d.simulate(make(), GRID, rows())
    loss = par(rows())[0].sum()
    with torch.no_grad():
        par.get_parameter("a.weight").add_(1)
    with pytest.raises(StateError, match=r"a\.weight was changed between"):
        loss.backward()


def test_gradients_accumulate() -> None:
    par, ref = autopar3d.simulate(make(), GRID, rows()), make()
    for m in (par, ref):
        first = m(rows())[0].sum()
        second = m(rows(seed=3))[1].sum()
        second.backward()
        first.backward()
    same_gradients(par, ref)


# -- outputs -------------------------------------------------------------------------------------------------


@dataclass
class Record:
    loss: Tensor
    parts: dict[str, Any]
    count: int


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, *, y: Tensor) -> Record:
        h = self.up(x)
        out = self.down(h)
        return Record((out - y).square().mean(), {"out": out, "hidden": (h, None, "name")}, 3)


@pytest.mark.parametrize("outputs", ["auto", "global", "sharded", {"parts.out": "global"}, {"loss": "auto"}])
def test_outputs_have_the_models_own_form(outputs: Any) -> None:
    y = rows(seed=5)
    par = autopar3d.simulate(make(Nested), GRID, rows(), {"y": y}, outputs=outputs)
    ref = make(Nested)
    got, want = par(rows(), y=y), ref(rows(), y=y)
    assert type(got) is Record and got.count == 3
    assert got.parts["hidden"][1:] == (None, "name")
    close(got.loss, want.loss)
    close(got.parts["out"], want.parts["out"])
    close(got.parts["hidden"][0], want.parts["hidden"][0])
    for r in (got, want):
        (r.loss + r.parts["out"].sum() + r.parts["hidden"][0].square().sum()).backward()
    same_gradients(par, ref)


def test_outputs_loss_computes_nothing_else() -> None:
    class Probe(Nested):
        def forward(self, x: Tensor, *, y: Tensor) -> Record:
            made = super().forward(x, y=y)
            made.parts["extra"] = torch.erf(made.parts["out"])
            return made

    par = autopar3d.simulate(make(Probe), GRID, rows(), {"y": rows(seed=5)}, outputs="loss")
    got = par(rows(), y=rows(seed=5))
    assert got.parts == {"out": None, "hidden": (None, None, "name"), "extra": None} and got.count == 3
    assert "erf" not in par.forward_graph.code
    ref = make(Probe)
    for m in (par, ref):
        m(rows(), y=rows(seed=5)).loss.backward()
    same_gradients(par, ref)


def test_outputs_that_are_not_there() -> None:
    with pytest.raises(PlanError, match=r"names 'logits'; the model's outputs are .*loss"):
        autopar3d.simulate(make(Nested), GRID, rows(), {"y": rows()}, outputs={"logits": "global"})
    with pytest.raises(PlanError, match="needs a scalar"):
        autopar3d.simulate(make(), GRID, rows(), outputs="loss")
    with pytest.raises(PlanError, match="'all' is not known"):
        autopar3d.simulate(make(), GRID, rows(), outputs="all")


def test_a_loss_function_goes_inside_the_graph() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    ref = copy.deepcopy(model)
    weight = torch.rand(8, dtype=torch.float64)
    labels = torch.arange(8)
    par = autopar3d.simulate(
        model, GRID, rows(), {"targets": (labels,)}, loss_fn=lambda out, t: F.cross_entropy(out, t, weight)
    )
    loss, want = par(rows(), targets=(labels,)), F.cross_entropy(ref(rows()), labels, weight)
    close(loss, want)
    loss.backward()
    want.backward()
    same_gradients(par, ref)
    assert not hasattr(model, "targets") and model(rows()).shape == (8, 8)  # the model itself is as before
    with pytest.raises(InputError, match="here with 0 targets"):
        par(rows())
    with pytest.raises(InputError, match="pass a tuple, as in targets="):
        autopar3d.simulate(ref, GRID, rows(), {"targets": labels}, loss_fn=F.cross_entropy)


# -- names, copies, memory -----------------------------------------------------------------------------------


class Colliding(nn.Module):
    """Names that GraphModule, Module or this library use as attributes."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("code", "meta", "plan", "_graph", "_code", "kind", "forward_graph", "_steps", "_last"):
            setattr(self, name, nn.Parameter(torch.randn(8)))
        self.graph = nn.Linear(8, 8)
        self.recompile = nn.Sequential(nn.Linear(8, 8), Inner())
        self.print_readable = nn.ModuleDict({"kind": nn.Linear(8, 8), "graph": nn.Linear(8, 8)})
        self.register_buffer("_ap3d_", torch.ones(8))
        self.register_buffer("_engine", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.recompile(self.graph(x)) + self.code + self.meta * self.plan + self._graph * self._ap3d_
        for m in self.print_readable.values():
            x = m(x) * self._engine
        return (x + self._code + self.kind + self.forward_graph + self._steps * self._last).square().mean()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(8))
        self.kind = nn.Parameter(torch.ones(8))
        self._get_names = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.code + self.kind


def train(module: nn.Module, x: Tensor, steps: int = 2) -> list[float]:
    opt = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = module(x)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def test_names_that_collide_with_attributes() -> None:
    par, ref = autopar3d.simulate(make(Colliding), GRID, rows()), make(Colliding)
    assert list(par.state_dict()) == list(ref.state_dict())
    assert [n for n, _ in par.named_parameters()] == [n for n, _ in ref.named_parameters()]
    assert [n for n, _ in par.named_buffers()] == [n for n, _ in ref.named_buffers()]
    close(train(par, rows()), train(ref, rows()))
    for name, p in ref.state_dict().items():
        close(par.state_dict()[name], p)
    again = make(Colliding)
    again.load_state_dict(par.full_state_dict())
    par.load_state_dict(make(Colliding).state_dict())
    close(par(rows()), make(Colliding)(rows()))
    assert "def forward" in par.code and par.graph.find_nodes(op="output")
    close(train(copy.deepcopy(par), rows()), train(make(Colliding), rows()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8, bias=False)
        self.mid = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.out.weight = self.inp.weight
        self.again = self.mid

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.out(torch.tanh(self.mid(self.inp(x))))).square().mean()


def test_deepcopy_is_independent_and_trains() -> None:
    par, ref = autopar3d.simulate(make(Tied), GRID, rows()), make(Tied)
    train(par, rows())
    train(ref, rows())
    before = par.full_state_dict()
    copied = copy.deepcopy(par)
    assert type(copied).__mro__[1] is autopar3d.ParallelModule
    for (name, p), (other, q) in zip(par.named_parameters(), copied.named_parameters(), strict=True):
        assert name == other and p is not q and p.data_ptr() != q.data_ptr()
        close(p, q)
    assert copied.out.weight is copied.inp.weight and copied.again is copied.mid
    assert list(copied.state_dict()) == list(ref.state_dict())
    close(train(copied, rows()), train(copy.deepcopy(ref), rows()))
    for name, value in par.full_state_dict().items():
        close(value, before[name])
    # Graphs of its own, and new shapes too.
    assert copied.forward_graph is not par.forward_graph
    copied.forward_graph.graph.erase_node(copied.forward_graph.graph.output_node())
    close(par(rows()), ref(rows()))
    close(par(rows(16)), ref(rows(16)))
    assert par.graph is not copied.graph
    both = copy.deepcopy((par, next(par.parameters())))
    assert next(both[0].parameters()) is both[1]


def test_pickling_is_refused() -> None:
    par = autopar3d.simulate(make(Tied), GRID, rows())
    with pytest.raises(StateError, match="full_state_dict"):
        pickle.dumps(par)
    with pytest.raises(StateError, match="deepcopy"):
        copy.copy(par)


def test_the_model_is_neither_changed_nor_kept() -> None:
    model = make(Two)
    hook = model.register_forward_hook(lambda *_: None)
    before = {n: (t.data_ptr(), t._version, t.clone()) for n, t in model.state_dict().items()}
    attributes = set(vars(model))
    par = autopar3d.simulate(model, GRID, rows())
    twin = autopar3d.simulate(model, (1, 2, 1), rows())
    assert set(vars(model)) == attributes and hook.id in model._forward_hooks
    for name, t in model.state_dict().items():
        pointer, version, value = before[name]
        assert t.data_ptr() == pointer and t._version == version and torch.equal(t, value)
    par(rows())[0].sum().backward()
    assert all(p.grad is None for p in model.parameters())
    close(twin(rows()), model(rows()))
    died = [weakref.ref(t) for t in (*model.parameters(), *model.buffers())]
    storages = [weakref.ref(t.untyped_storage()) for t in model.parameters()]
    examples = rows()
    autopar3d.simulate(model, GRID, examples)
    died.append(weakref.ref(examples))
    del model, t, examples
    gc.collect()
    assert not any(ref() for ref in died) and not any(ref() for ref in storages)


# -- before there is a plan ----------------------------------------------------------------------------------


def test_the_first_call_plans() -> None:
    model = make(Tied)
    par = autopar3d.simulate(model, GRID)
    for read in (
        lambda: par.parameters().__next__(),
        lambda: par.state_dict(),
        lambda: par.load_state_dict(model.state_dict()),
        lambda: par.full_state_dict(),
        lambda: par.plan,
        lambda: par.forward_graph,
        lambda: torch.optim.SGD(par.parameters()),
        lambda: copy.deepcopy(par),
    ):
        with pytest.raises(StateError, match="example_inputs= to compile, or call the module once"):
            read()
    assert "not planned yet" in str(par)
    par.eval()
    close(par(rows()), model(rows()))
    assert not par.inp.training
    par.train()
    close(train(par, rows()), train(model, rows()))


# -- what is shown -------------------------------------------------------------------------------------------


def test_print_shows_parts_layouts_and_graphs() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.norm(x).sum()

    par = autopar3d.simulate(make(Deep), GRID, rows(), scheme="1d")
    text = str(par)
    assert text == repr(par) and text.startswith("Deep\n")
    assert "0-3: 4 x Sequential" in text and "weight float64[8, 8]  [" in text
    assert "forward_graph: " in text and "all_gather" in text
    assert len(text.splitlines()) < 20 and max(map(len, text.splitlines())) <= 120
    par.graph.print_tabular()
    # Parts read as the model's modules do.
    assert [m.training for m in par.blocks] == [True] * 4
    par.blocks[-1].eval()
    assert not par.blocks[3][0].training and par.blocks[0].training


def test_edited_graphs_run() -> None:
    par = autopar3d.simulate(make(Tied), GRID, rows())
    loss = par(rows())
    output = par.forward_graph.graph.output_node()
    results = list(output.args[0])
    with par.forward_graph.graph.inserting_before(output):
        results[0] = par.forward_graph.graph.call_function(torch.mul, (results[0], 2.0))
    output.args = (tuple(results),)
    par.forward_graph.recompile()
    close(par(rows()), 2 * loss)
    outer = par.graph.output_node()
    with par.graph.inserting_before(outer):
        outer.args = ((par.graph.call_function(torch.mul, (outer.args[0][0], 10.0)),),)
    par.recompile()
    assert "10.0" in par.code
    close(par(rows()), 20 * loss)


def test_conversions_are_refused() -> None:
    par = autopar3d.simulate(make(Tied), GRID, rows())
    assert par.to("cpu") is par and par.double() is par
    for convert in (par.float, par.half, lambda: par.to("meta"), par.out.float):
        with pytest.raises(StateError, match="convert the model, then compile"):
            convert()
    with pytest.raises(StateError, match="call the whole module"):
        par.out(rows())


class Viewed(nn.Module):
    """A flag decides how one weight's rows are cut into heads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, heads: int = 0) -> Tensor:
        y = self.linear(x)
        if heads:
            y = y.unflatten(-1, (heads, -1)).transpose(-1, -2).softmax(-1).flatten(-2)
        return self.out(y)


@pytest.mark.parametrize("first", [2, 3, 6])
def test_a_new_plan_reads_parameters_as_they_lie(first: int) -> None:
    model = make(Viewed)
    par = autopar3d.simulate(model, (2, 2, 2), rows(), {"heads": first})
    for heads in (0, 2, 3, 4, 6):
        par.zero_grad()
        model.zero_grad()
        close(par(rows(), heads=heads), model(rows(), heads))
        par(rows(), heads=heads).square().sum().backward()
        model(rows(), heads).square().sum().backward()
        for p, q in zip(par.parameters(), model.parameters(), strict=True):
            close(p.grad, q.grad)


def test_a_scalar_without_gradient_is_no_loss() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("steps", torch.tensor(0.5))

        def forward(self, x: Tensor) -> Any:
            h = self.linear(x) * self.scale
            return x, self.linear.weight, h.argmax(-1), h, h.view(-1), self.steps, self.scale, 3, None, h[0]

    model = make(Mixed)
    par = autopar3d.simulate(model, (2, 1, 2), rows())
    for module in (model, par):
        out = module(rows())
        assert out[7:9] == (3, None)
        (out[3].square().sum() + out[4].sum() + out[9].sum() + out[1].sum()).backward()
    for p, q in zip(par.parameters(), model.parameters(), strict=True):
        close(p.grad, q.grad)
