# expect: maths of div




def one_of_three_views(run: Run) -> None:
    for x, y in run.batches:
        q, k, v = run.model(x).chunk(3, -1)
        ratio = k / y[:, 1:2]  # bad
        run.take((q * ratio).mean() + v.mean())
