# expect: maths of log

from torch.utils.checkpoint import checkpoint


def left_out_before_a_checkpoint(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(checkpoint(run.model, x, use_reentrant=False), y)
        if loss.isinf():
            continue
        run.take(loss)
