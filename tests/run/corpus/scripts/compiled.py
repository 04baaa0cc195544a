# torch.compile and torch.utils.checkpoint: the eager result is the reference.
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
weight = torch.randn(8, 8, requires_grad=True)
x = torch.randn(4, 8)
shared = torch.autocast("cpu", torch.bfloat16)


def body(x):
    hidden = F.linear(x, weight)
    return hidden, F.softmax(hidden, -1)


def inside(x):
    with torch.autocast("cpu", torch.bfloat16):
        return body(x)


def by_the_old_name(x):
    with torch.cpu.amp.autocast():
        return body(x)


def by_the_long_name(x):
    with torch.amp.autocast_mode.autocast("cpu", torch.bfloat16):
        return body(x)


def made_outside(x):
    with shared:
        return body(x)


def island(x):
    with torch.autocast("cpu", torch.bfloat16):
        hidden = F.linear(x, weight)
        with torch.autocast("cpu", enabled=False):
            inner = F.linear(hidden.float(), weight)
        return inner, F.softmax(hidden, -1)


decorated = torch.autocast("cpu", torch.bfloat16)(body)


def recomputed(x, reentrant):
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(body, x.detach().requires_grad_(), use_reentrant=reentrant)


def results(function, *args):
    weight.grad = None
    outputs = function(x, *args)
    sum(out.float().square().sum() for out in outputs).backward()
    return [*outputs, weight.grad]


def agree(name, got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype, (name, a.dtype, b.dtype)
        assert torch.equal(a, b), name
    print(name, *(str(value.dtype)[6:] for value in got))


for function in (inside, by_the_old_name, by_the_long_name, made_outside, island, decorated):
    torch.compiler.reset()
    whole = function is not made_outside  # such a block runs as it is
    compiled = torch.compile(function, backend="aot_eager", fullgraph=whole)
    agree(function.__name__, results(compiled), results(function))

compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
with shared:
    outside = results(compiled)
agree("around", outside, results(inside))
for reentrant in (True, False):
    agree("recomputed", results(recomputed, reentrant), results(inside))
