# expect: maths of sqrt




def bad_gradients_scaled(run: Run) -> None:
    for x, y in run.batches:
        out = run.model(x)
        distance = (out * y.gt(0)).square().sqrt()  # bad
        run.take_scaled(distance.mean())
