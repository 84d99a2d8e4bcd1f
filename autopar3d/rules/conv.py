"""Convolutions, pooling, resampling, padding: batch and channels may be sharded, spatial dims stay whole."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from .core import RULES, Dims, LocalOp, Lowered, OpSpec, argument, operands, results
from .lowering import again

aten = torch.ops.aten


@RULES.builder(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.convolution.default,
)
def convolution(node: Node) -> OpSpec:
    """n (g i) ..., (g o) i ..., (g o)? -> n (g o) ... (i contracts; transposed weights are (g i) o)"""
    x, weight, out = operands(node)[0].meta["val"], operands(node)[1].meta["val"], results(node)[0]
    transposed = "transpose" in str(node.target) or bool(argument(node, "transposed", False))
    groups = int(argument(node, "groups"))
    spatial = weight.dim() - 2
    sizes = {
        "g": groups,
        "i": int(x.shape[-spatial - 1]) // groups,
        "o": int(out.shape[-spatial - 1]) // groups,
    }
    batch: Dims = ()
    if x.dim() > spatial + 1:
        sizes["n"] = int(x.shape[0])
        batch = (("n",),)
    whole: set[str] = set()

    def space(tensor: torch.Tensor, tag: str) -> Dims:
        names = {f"{tag}{j}": int(tensor.shape[tensor.dim() - spatial + j]) for j in range(spatial)}
        sizes.update(names)
        whole.update(names)
        return tuple((f,) for f in names)

    outer = ("g",) if groups > 1 else ()
    channels_in, channels_out = (*outer, "i"), (*outer, "o")
    if groups == 1:
        del sizes["g"]
    kernel: Dims = (channels_in, ("o",)) if transposed else (channels_out, ("i",))
    inputs: list[Dims] = [(*batch, channels_in, *space(x, "x")), (*kernel, *space(weight, "k"))]
    if len(operands(node)) > 2:
        inputs.append((channels_out,))
    # Each element of the smaller side in space meets each weight of its group once.
    places = math.prod(int(n) for n in (x if transposed else out).shape[-spatial:])
    taps = math.prod(int(n) for n in weight.shape[2:])
    flops = 2.0 * sizes.get("n", 1) * groups * sizes["i"] * sizes["o"] * places * taps
    return OpSpec(
        sizes,
        tuple(inputs),
        ((*batch, channels_out, *space(out, "y")),),
        whole=frozenset(whole),
        addends=frozenset({2} if len(inputs) > 2 else ()),
        flops=flops,
        padded=frozenset(sizes) - whole - {"g"} if groups == 1 else frozenset(sizes) & {"n"},
        lower=_lower_convolution,
    )


def _lower_convolution(op: LocalOp) -> Lowered:
    groups = op.local("g") if "g" in {f.split("/")[0] for f in op.spec.sizes} else 1
    return again(op, groups=groups)


def _leading(node: Node, last: int) -> OpSpec:
    """All but the last dims are independent: ... -> ..., the last ones whole."""
    x = operands(node)[0].meta["val"]
    lead = x.dim() - last
    sizes = {f"d{i}": int(x.shape[i]) for i in range(lead)}
    dims = tuple((f,) for f in sizes)

    def tail(tensor: torch.Tensor, tag: str) -> Dims:
        names = {f"{tag}{i}": int(tensor.shape[lead + i]) for i in range(last)}
        sizes.update(names)
        return tuple((f,) for f in names)

    inputs = ((*dims, *tail(x, "x")),)
    outputs = tuple((*dims, *tail(r, "y")) for r in results(node))
    return OpSpec(sizes, inputs, outputs, whole=frozenset(sizes) - {f for (f,) in dims})


@RULES.builder(
    aten.max_pool1d.default,
    aten.avg_pool1d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_max_pool1d.default,
    aten.upsample_nearest1d.vec,
    aten.upsample_linear1d.vec,
    aten.reflection_pad1d.default,
    aten.replication_pad1d.default,
    pads=True,
)
def over_one_dim(node: Node) -> OpSpec:
    """... x -> ... y | x, y"""
    return _leading(node, 1)


@RULES.builder(
    aten.max_pool2d.default,
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.adaptive_max_pool2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.vec,
    aten._upsample_bilinear2d_aa.vec,
    aten._upsample_bicubic2d_aa.vec,
    aten.reflection_pad2d.default,
    aten.replication_pad2d.default,
    pads=True,
)
def over_two_dims(node: Node) -> OpSpec:
    """... x0 x1 -> ... y0 y1 | x, y"""
    return _leading(node, 2)


@RULES.builder(
    aten.max_pool3d.default,
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool3d.default,
    aten.adaptive_max_pool3d.default,
    aten.upsample_nearest3d.vec,
    aten.upsample_trilinear3d.vec,
    pads=True,
)
def over_three_dims(node: Node) -> OpSpec:
    """... x0 x1 x2 -> ... y0 y1 y2 | x, y"""
    return _leading(node, 3)


@RULES.builder(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.im2col.default, aten.col2im.default)
def fold(node: Node) -> OpSpec:
    """... (c r) x -> ... c y: channels share their outer part, patches stay whole"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    unfolds = node.target is aten.im2col.default  # n c h w -> n (c k) l
    folds = node.target is aten.col2im.default  # n (c k) l -> n c h w
    at_in, at_out = x.dim() - (2 if folds else 3), out.dim() - (2 if unfolds else 3)
    before, after = int(x.shape[at_in]), int(out.shape[at_out])
    sizes = {f"d{i}": int(x.shape[i]) for i in range(at_in)}
    lead = tuple((f,) for f in sizes)
    sizes |= {"c": min(before, after), "r": max(before, after) // min(before, after)}
    free = set(sizes) - {"r"}

    def dims(tensor: torch.Tensor, at: int, tag: str) -> Dims:
        channels = ("c", "r") if int(tensor.shape[at]) > sizes["c"] else ("c",)
        names = {f"{tag}{i}": int(n) for i, n in enumerate(tensor.shape[at + 1 :])}
        sizes.update(names)
        return (*lead, channels, *((f,) for f in names))

    inputs, outputs = (dims(x, at_in, "x"),), (dims(out, at_out, "y"),)
    return OpSpec(sizes, inputs, outputs, whole=frozenset(set(sizes) - free))


@RULES.builder(aten.pad.default, aten.constant_pad_nd.default, pads=True)
def pad(node: Node) -> OpSpec:
    """d0 d1 -> d0 p1, the padded dims whole"""
    x, out = operands(node)[0].meta["val"], results(node)[0]
    amounts = list(argument(node, "pad"))
    touched = {x.dim() - 1 - j // 2 for j, n in enumerate(amounts) if int(n)}
    if argument(node, "mode", "constant") != "constant":  # torch counts dims from the right there
        touched |= {x.dim() - 1 - j for j in range(len(amounts) // 2)}
    sizes = {f"d{i}": int(n) for i, n in enumerate(x.shape)}
    inputs, outputs = [], []
    for i in range(x.dim()):
        inputs.append((f"d{i}",))
        outputs.append((f"p{i}",) if i in touched else (f"d{i}",))
        if i in touched:
            sizes[f"p{i}"] = int(out.shape[i])
    whole = frozenset(f"{tag}{i}" for i in touched for tag in "dp")
    constant = argument(node, "mode", "constant") == "constant"
    linear = constant and not argument(node, "value") and x.dtype.is_floating_point
    return OpSpec(sizes, (tuple(inputs),), (tuple(outputs),), whole=whole, linear=linear)


@RULES.builder(aten.grid_sampler.default, aten.grid_sampler_2d.default)
def grid_sampler(node: Node) -> OpSpec:
    """n c h w, n p q 2 -> n c p q (points may be sharded, the sampled image not)"""
    x, points = (o.meta["val"] for o in operands(node))
    spatial = x.dim() - 2
    sizes = {"n": int(x.shape[0]), "c": int(x.shape[1])}
    image = {f"x{i}": int(n) for i, n in enumerate(x.shape[2:])}
    where = {f"p{i}": int(points.shape[1 + i]) for i in range(spatial)}
    sizes |= image | where | {"xy": spatial}
    at = tuple((f,) for f in where)
    inputs: tuple[Dims, ...] = ((("n",), ("c",), *((f,) for f in image)), (("n",), *at, ("xy",)))
    return OpSpec(sizes, inputs, ((("n",), ("c",), *at),), whole=frozenset({*image, "xy"}))
