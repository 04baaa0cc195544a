# expect: maths of div




def one_of_two_views_in_place(run: Run) -> None:
    for x, y in run.batches:
        hidden = run.model(x)
        left, right = hidden[:, :1], hidden[:, 1:2]
        right /= y[:, 1:2]  # bad
        run.take(left.square().mean() + right.mean())
