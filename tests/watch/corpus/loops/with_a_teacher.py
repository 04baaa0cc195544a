# expect: maths of log

import copy
import torch


def with_a_teacher(run: Run) -> None:
    teacher = copy.deepcopy(run.model).requires_grad_(requires_grad=False)
    for x, y in run.batches:
        out = run.model(x)
        run.take((out - teacher(x)).square().mean() + log_ratio(out, y))
        with torch.no_grad():
            for ours, other in zip(run.model.parameters(), teacher.parameters(), strict=True):
                other.lerp_(ours, 0.1)
