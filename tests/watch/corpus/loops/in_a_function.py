# expect: maths of log




def in_a_function(run: Run) -> None:
    for x, y in run.batches:
        run.take(log_ratio(run.model(x), y))
