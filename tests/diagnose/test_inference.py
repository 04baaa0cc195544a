"""Steps without a loss: their outputs are the ends, also where the bad ones were replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep


@dataclass
class Decoded:
    """The output of a decoder."""

    sample: Tensor


class Vae(nn.Module):
    """Called by a method other than forward, as those of diffusers are."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Conv2d(8, 3, 3))
        with torch.no_grad():
            self.decoder[0].weight.mul_(gain)
            self.decoder[2].weight.mul_(gain)

    def decode(self, latents: Tensor) -> Decoded:
        return Decoded(self.decoder(latents))


def image(sample: Tensor) -> Tensor:
    return (sample.float() * 0.5 + 0.5).clamp(0, 1)


AFTERWARDS: dict[str, Callable[[Decoded], Any]] = {
    "output": lambda decoded: decoded,
    "tensor": lambda decoded: image(decoded.sample),
    "numpy": lambda decoded: image(decoded.sample).cpu().numpy(),
    "nan_to_num": lambda decoded: image(decoded.sample).nan_to_num(),
    "uint8": lambda decoded: (image(decoded.sample).nan_to_num() * 255).to(torch.uint8),
    "numpy uint8": lambda decoded: (image(decoded.sample).numpy() * 255).astype("uint8"),
    "nothing": lambda decoded: None,
}


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("afterwards", AFTERWARDS)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_a_bad_output_is_found_whatever_becomes_of_it(afterwards, around):
    latents = torch.randn(1, 4, 8, 8).half()

    def step_of(vae: Vae) -> Callable[[], Any]:
        def step() -> Any:
            with around():
                return AFTERWARDS[afterwards](vae.decode(latents))

        return step

    good = halfstep.diagnose(step_of(Vae(1.0).half()))
    assert good.verdict == "none", str(good)
    bad = halfstep.diagnose(step_of(Vae(3e3).half()))
    assert bad.verdict == "range", str(bad)
    assert (bad.bad.op, bad.bad.module) == ("convolution", "decoder.2")
    is_replaced = any("inf and NaN are replaced on the way" in note for note in bad.notes)
    assert is_replaced == (afterwards in ("tensor", "numpy", "nan_to_num", "uint8"))


def test_infinities_on_purpose_in_an_output_are_no_fault() -> None:
    class Filters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(x)
            return logits.masked_fill(logits < 0, -torch.inf)

    model, x = Filters(), torch.randn(2, 4)
    found = halfstep.diagnose(lambda: torch.softmax(model(x), -1).argmax(-1))
    assert found.verdict == "none", str(found)
