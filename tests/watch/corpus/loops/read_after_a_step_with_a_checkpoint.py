# expect: maths of log

from torch.utils.checkpoint import checkpoint


def read_after_a_step_with_a_checkpoint(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(checkpoint(run.model, x, use_reentrant=False), y)
        run.take_scaled(loss)
        run.losses[-1] += loss.item()
