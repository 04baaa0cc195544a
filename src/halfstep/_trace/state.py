"""What a trace knows of each thread: the rules that run in it, and what its nodes were made for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from halfstep._autocast.rule import Rule
from halfstep._pytorch import autograd
from halfstep._trace.rows import Cast, Phase


@dataclass
class Ruled:
    """An op that runs by a rule.

    Attributes:
        op: Its name.
        rule: The rule.
        switches: The lower precision, and whether casts of weights are kept.
        casts: Made for the next op that computes something in it.
    """

    op: str
    rule: Rule
    switches: tuple[str | None, bool]
    casts: list[Cast] = field(default_factory=list)


class Place(NamedTuple):
    """What an op belongs to.

    Attributes:
        module: The path of its module.
        call: Which call of it.
        rule: The text of the rule that decided.
        op: What that rule was asked for.
        cast: The number of the cast, if it is one.
        number: Of a node of autograd: that of the op that it was made for.
    """

    module: str = ""
    call: int = 0
    rule: str | None = None
    op: str | None = None
    cast: int | None = None
    number: int = -1


class ThreadState(threading.local):
    """What runs in a thread.

    Attributes:
        ruled: The ops that run by a rule, each inside the one before it.
        next_node: The number that the next node of autograd got when an op was last seen.
        nodes: What the nodes of autograd that it made were made for, by their numbers.
        records: For each backward pass whether gradients are recorded in it.
        recomputed: Backward passes that began in it after something was recomputed.
        phase: That of the last op.
    """

    def __init__(self) -> None:
        self.ruled: list[Ruled] = []
        self.next_node = autograd.next_sequence_number()
        self.nodes: dict[int, Place] = {}
        self.records: dict[int, bool] = {}
        self.recomputed: set[int] = set()
        self.phase: Phase = "forward"
