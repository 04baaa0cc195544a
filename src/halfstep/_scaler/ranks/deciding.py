"""How the step of one optimizer is decided: by this rank, or by several together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from halfstep._scaler import passes
from halfstep._scaler.gradients import Gradients
from halfstep._scaler.passes import Norms
from halfstep._scaler.ranks.agreement import Agreement, Claim
from halfstep._scaler.ranks.group import Group
from halfstep._scaler.ranks.sharding import Layout
from halfstep._scaler.scalars import Scalar, moved, scalar
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from halfstep._scaler.iteration import GradientCheck


@dataclass(eq=False)
class Alone:
    """This rank decides: there is no other one, or the others have the same gradients.

    Attributes:
        sees_all_losses: Whether there is no other loss than this rank's. What only some ranks know
            must not move the scale.
    """

    sees_all_losses: bool = True

    is_together = False

    def agree_on(
        self, check: GradientCheck, norms: Norms | None = None, *, has_gradients: bool = True
    ) -> None:
        """Let a check of gradients be as it is."""
        if not self.sees_all_losses:
            check.scale.settle_loss(None)

    def start_norm(
        self, norms: Norms, gradients: Gradients, device: torch.device
    ) -> Callable[[], Scalar]:
        """Return a function that returns the norm of all gradients, still scaled."""
        return lambda: norms.total(device)

    def p_norm(self, gradients: Gradients, p: float, device: torch.device) -> Tensor:
        """Return the p-norm of all gradients, still scaled."""
        return passes.p_norm(gradients, p, device)

    def norms_of_parts(self, norms: list[Scalar], parts: list[Gradients], p: float) -> list[Scalar]:
        """Return the norms of parts of the gradients, each over all ranks that have some of it."""
        return norms


ALONE = Alone()


class Together:
    """Several ranks decide.

    Args:
        layout: Where the parameters lie.
        call: What asks: ``step(SGD)``.
        losses: The names of the losses of this iteration.
        has_scale: Whether a loss has ever been scaled on this rank.
        next_number: Returns how many agreements there were before.
    """

    is_together = True

    def __init__(
        self,
        layout: Layout,
        call: str,
        losses: Sequence[str | None],
        has_scale: bool,
        next_number: Callable[[], int],
    ) -> None:
        self.group, self._layout, self.call = layout.group, layout, call
        self._losses, self._has_scale, self._next_number = losses, has_scale, next_number

    def agree_on(
        self, check: GradientCheck, norms: Norms | None = None, *, has_gradients: bool = True
    ) -> None:
        """Start to tell the other ranks what a check of gradients has found. Sync: none.

        Args:
            check: What it found becomes what all ranks have found.
            norms: The norms of its gradients, if measured.
            has_gradients: Whether there are any, looked at now or before.
        """
        gradients, own_norm = check.gradients, None
        if norms is not None and self._layout.owns_all(gradients):
            own_norm = norms.total(check.scale.tensor.device)
        claim = Claim(
            check.scale,
            self._losses,
            list(check.found_here.values()),
            amax=check.amax_here,
            own_norm=own_norm,
            has_gradients=has_gradients,
            has_scale=self._has_scale,
            call=self.call,
        )
        check.agreement = Agreement(self.group, claim, self._next_number())

    def start_norm(
        self, norms: Norms, gradients: Gradients, device: torch.device
    ) -> Callable[[], Scalar]:
        """Return a function that returns the norm of the gradients of all ranks, still scaled.

        Sync: none; on the CPU the function waits for the other ranks.
        """
        squares = norms.sum_of_squares(device, self._layout.shares(gradients))
        wait = self._sum(squares.reshape(1), self.group)
        return lambda: scalar(wait()[0].sqrt())

    def p_norm(self, gradients: Gradients, p: float, device: torch.device) -> Tensor:
        """Return the p-norm of the gradients of all ranks, still scaled. Sync as above."""
        if p == math.inf:
            norm = passes.p_norm(gradients, p, device) if gradients.grads else _zero(device)
            return self._largest([norm], self.group)[0]
        power = self._power(None, gradients, p, device)
        return self._sum(power[None], self.group)()[0].pow(1.0 / p)

    def norms_of_parts(self, norms: list[Scalar], parts: list[Gradients], p: float) -> list[Scalar]:
        """Return the norms of parts of the gradients, each over all ranks that have some of it.

        Args:
            norms: Of what this rank holds, for one device.
            parts: These gradients; parts of the same parameters on all ranks that share them.
            p: The kind of norm.

        Raises:
            RanksError: Some have a part of the parameters that no process group reaches.
        """
        sharing = self._layout.sharing
        if sharing is None or not norms:
            return norms  # parameters are whole on each rank, or all that share them have none
        if not sharing.parts:
            raise RanksError(
                f"{self.call}: the norms of single layers or parameters are spread over the ranks "
                f"{list(sharing.ranks)}, and no mesh of theirs has just these. Clip per='all'"
            )
        given = [
            n if isinstance(n, Tensor) else torch.tensor(n, dtype=torch.float64) for n in norms
        ]
        if p == math.inf:
            return list(map(scalar, self._largest(given, sharing)))
        powers = [
            self._power(norm, part, p, norm.device) for norm, part in zip(given, parts, strict=True)
        ]
        return list(map(scalar, self._sum(torch.stack(powers), sharing)().pow(1.0 / p)))

    def _power(
        self, norm: Tensor | None, part: Gradients, p: float, device: torch.device
    ) -> Tensor:
        """Return the share of this rank in the sum of the p-th powers of all entries."""
        by_share = self._by_share(part)
        if norm is not None and len(by_share) == 1:
            return norm.double().pow(p) * by_share[0][0]
        powers = [passes.p_norm(some, p, device).double().pow(p) * by for by, some in by_share]
        return torch.stack([_zero(device), *powers]).sum()

    def _by_share(self, gradients: Gradients) -> list[tuple[float, Gradients]]:
        shares = self._layout.shares(gradients) or [1.0] * len(gradients.grads)
        return [
            (share, gradients.at([at for at, one in enumerate(shares) if one == share]))
            for share in dict.fromkeys(shares)
        ]

    def _sum(self, values: Tensor, group: Group) -> Callable[[], Tensor]:
        device = values.device
        reduction = group.reduce(
            moved(values, group.device), distributed.ReduceOp.SUM, f"{self.call}: the norm"
        )
        return lambda: moved(reduction.wait(), device)

    def _largest(self, norms: Sequence[Tensor], group: Group) -> list[Tensor]:
        # The maximum of NaN and a number may be the number.
        values = torch.stack(list(norms)).nan_to_num(nan=math.inf, posinf=math.inf)
        values = moved(values, group.device)
        purpose = f"{self.call}: the largest gradient"
        largest = group.reduce(values, distributed.ReduceOp.MAX, purpose).wait()
        return list(largest.to(norms[0].device))


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)
