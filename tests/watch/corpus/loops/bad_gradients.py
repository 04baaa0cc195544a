# expect: maths of sqrt




def bad_gradients(run: Run) -> None:
    for x, y in run.batches:
        out = run.model(x)
        distance = (out * y.gt(0)).square().sqrt()  # bad
        run.take(distance.mean())
