"""Values as a notebook shows them: their text, with nothing in it that is markup."""

import re

import torch
from torch import nn

import halfstep


def shown(value: object) -> str:
    page: str = value._repr_html_()  # type: ignore[attr-defined]
    found = re.fullmatch(r"<pre [^>]*>([^<]*)</pre>", page)
    return found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&#x27;", "'")


class Overflow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 300).half() * 300


def test_a_diagnosis_is_its_text() -> None:
    found = halfstep.diagnose(lambda: Overflow()(torch.ones(4, requires_grad=True)).sum())
    assert "mul" in str(found)
    assert shown(found).replace("&quot;", '"') == str(found)


def test_a_trace_is_its_table() -> None:
    with halfstep.trace(nn.Linear(2, 2)) as trace:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert shown(trace) == trace.table()


def test_a_policy_is_shown_by_action() -> None:
    policy = halfstep.Policy.parse("fp32; exp,log[fp16]:fp32; log:lower")
    assert shown(policy).splitlines() == [
        "fp32; exp,log[fp16]:fp32; log:lower",
        "  [fp16]:fp32, cast to float32:",
        "      exp",
        "  lower, cast to the lower precision:",
        "      log",
    ]
