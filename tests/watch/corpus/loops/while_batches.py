# expect: maths of log




def while_batches(run: Run) -> None:
    batches = iter(run.batches)
    while (batch := next(batches, None)) is not None:
        run.take(log_ratio(run.model(batch[0]), batch[1]))
