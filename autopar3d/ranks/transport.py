"""The one seam where a collective of a graph becomes calls of a backend.

A graph names a group by its axis's alias; what is registered under the alias decides. On NCCL that is the group itself.
On gloo it is a `DirectGroup`: each rank sends its parts straight to the others, and sums are taken locally. Measured
with `examples/benchmarks/collectives.py` (gloo of torch 2.13, bytes that leave a rank's link, for n bytes put in):

- reduce_scatter: gloo's own moves 2(g-1)/g n, as much as its all_reduce; sent straight it is (g-1)/g n.
- all_gather: the same bytes, at half to two thirds of the CPU time (gloo's own copies what it got once more). But much
  data over a limited link goes faster around gloo's ring, one message at a time: where all send to all at once, four
  links of 100 Mbit/s carried 80% of their rate, and with the ring 98%.
- all_reduce: gloo's own is a ring, right for much data and many ranks. Where all is sent to all, there is one round
  instead of 2(g-1): for two ranks (the same bytes), and for few bytes.

The graphs are the same for every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# All-reduces of at most this many bytes are sent to all: a few round trips of a slow link are worth some packets.
_FEW_BYTES = 16_384

# All-gathers of more than two ranks in which each puts in at least so many bytes go around gloo's ring.
_MANY_BYTES = 200_000

_TAG = 0x3D << 24


def transport(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """What to register under an axis's alias for its group."""
    return DirectGroup(group) if dist.get_backend(group) == "gloo" else group


class _Work(dist.Work):
    """Messages in flight, and what to do with them once they are there."""

    def __init__(self, messages: Sequence[dist.Work], finish: Callable[[], None], held: Any, limit: timedelta) -> None:
        super().__init__()
        self.messages, self.finish, self.held, self.limit = messages, finish, held, limit

    def wait(self, timeout: Any = None) -> bool:
        # A bucket's results are each waited for.
        messages, self.messages = self.messages, ()
        for message in messages:
            message.wait(self.limit)  # gloo's single messages know no timeout of their group
        finish, self.finish = self.finish, _nothing
        finish()
        self.held = None
        return True


class DirectGroup(dist.ProcessGroup):
    """Collectives from single messages over a gloo group.

    It can be made again at any time on some of the ranks. Messages between two ranks arrive in the order in which they
    were sent, and collectives start in the same order on all ranks: one tag serves all of a graph. Each graph has its
    own, so that ranks which run different graphs wait in vain, rather than take each other's values.

    Args:
        inner: the group; nobody else may use its sends and receives with these tags.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub lacks this form
        self.inner = inner
        self.limit: timedelta = inner._get_backend(torch.device("cpu")).options._timeout
        self.mark = 0  # of the graph that runs, below 1 << 24

    def getBackendName(self) -> str:  # noqa: N802
        return "gloo"

    def _exchange(self, parts: Sequence[Tensor], room: Sequence[Tensor]) -> list[dist.Work]:
        """Send parts[i] to rank i and receive room[i] from it; nothing to or from this rank itself."""
        me, size, tag = self.rank(), self.size(), _TAG + self.mark
        messages = []
        for step in range(1, size):
            messages.append(self.inner.recv([room[(me - step) % size]], (me - step) % size, tag))
            messages.append(self.inner.send([parts[(me + step) % size]], (me + step) % size, tag))
        return messages

    # The methods have the names, and take the arguments, with which torch calls them. Plain collectives come as buckets
    # of one.

    def all_gather_single_coalesced(self, *call: Any) -> dist.Work:
        outputs, inputs, _ = call
        size, me = self.size(), self.rank()
        mine, alone = _packed(inputs), len(inputs) == 1
        whole = (outputs[0] if alone else mine.new_empty(size * mine.numel())).view(size, -1)
        if size > 2 and mine.numel() * mine.element_size() >= _MANY_BYTES:
            messages = [self.inner.all_gather_single(whole.view(-1), mine)]
        else:
            messages = self._exchange([mine] * size, whole.unbind())
            whole[me].copy_(mine)

        def unpack() -> None:
            at = 0
            for output, part in zip(outputs, inputs, strict=True):
                output.view(size, -1).copy_(whole[:, at : at + part.numel()])
                at += part.numel()

        return _Work(messages, _nothing if alone else unpack, (mine, whole), self.limit)

    def reduce_scatter_single_coalesced(self, *call: Any) -> dist.Work:
        outputs, inputs, options = call
        if options.reduceOp != dist.ReduceOp.SUM:
            return self.inner.reduce_scatter_tensor_coalesced(outputs, inputs, options)
        size, me = self.size(), self.rank()
        rows = inputs[0].reshape(size, -1)
        if len(inputs) > 1:
            rows = torch.cat([x.reshape(size, -1) for x in inputs], 1)
        parts = list(rows.unbind())
        terms = [x if i == me else torch.empty_like(x) for i, x in enumerate(parts)]
        messages = self._exchange(parts, terms)

        def add() -> None:
            if len(outputs) == 1:
                _sum(terms, outputs[0].view(-1))
                return
            total = torch.empty_like(terms[0])
            _sum(terms, total)
            _unpack(total, outputs)

        return _Work(messages, add, rows, self.limit)

    def allreduce(self, *call: Any) -> dist.Work:
        return self._all_reduce(*call)

    def allreduce_coalesced(self, *call: Any) -> dist.Work:
        return self._all_reduce(*call)

    def _all_reduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        size, me = self.size(), self.rank()
        reduce = next((f for op, f in _REDUCTIONS if options.reduceOp == op), None)
        mine = _packed(tensors)
        if reduce is None or (size > 2 and mine.numel() * mine.element_size() > _FEW_BYTES):
            message = self.inner.allreduce([mine], op=options.reduceOp)
            return _Work([message], _nothing if len(tensors) == 1 else lambda: _unpack(mine, tensors), mine, self.limit)
        # The result takes the place of what is sent, so that must stay as it is until all is done.
        terms = [mine if i == me else torch.empty_like(mine) for i in range(size)]
        messages = self._exchange([mine] * size, terms)

        def combine() -> None:
            total = torch.empty_like(mine)
            reduce(terms, total)
            _unpack(total, tensors)

        return _Work(messages, combine, mine, self.limit)

    def all_to_all_single(self, *call: Any) -> dist.Work:
        output, source, received, given, _ = call
        size, me = self.size(), self.rank()
        room = output.split(list(received)) if received else output.chunk(size)
        parts = source.split(list(given)) if given else source.chunk(size)
        messages = self._exchange(parts, room)
        room[me].copy_(parts[me])
        return _Work(messages, _nothing, source, self.limit)


def _nothing() -> None:
    pass


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].view(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.view(-1).copy_(part)


def _sum(terms: Sequence[Tensor], out: Tensor) -> None:
    """In the order of ranks, the same on all of them."""
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    if len(terms) > 2 and out.dtype in (torch.bfloat16, torch.float16):
        torch.sum(torch.stack(list(terms)), 0, out=out)  # rounds once
        return
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)


def _extreme(function: Callable[..., Tensor]) -> Callable[[Sequence[Tensor], Tensor], None]:
    def reduce(terms: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(terms[0])
        for term in terms[1:]:
            function(out, term, out=out)

    return reduce


_REDUCTIONS = (
    (dist.ReduceOp.SUM, _sum),
    (dist.ReduceOp.MAX, _extreme(torch.maximum)),
    (dist.ReduceOp.MIN, _extreme(torch.minimum)),
)
