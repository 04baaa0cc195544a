# expect: maths of log

import torch


def left_out_by_a_question(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if torch.isnan(loss).any() or not torch.isfinite(loss):
            continue
        run.take(loss)
