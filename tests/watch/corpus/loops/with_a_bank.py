# expect: maths of log

import torch


def with_a_bank(run: Run) -> None:
    bank = torch.ones(8, 3)
    for index, (x, y) in enumerate(run.batches):
        out = run.model(x)
        similar = out @ bank.clone().T
        bank[index] = out.detach().mean(0)
        loss = similar.square().mean() + log_ratio(out, y)
        run.take(loss)
