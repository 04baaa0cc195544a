# expect: maths of log

from torch.nn import functional as F


def with_random_numbers_in_place(run: Run) -> None:
    for x, y in run.batches:
        drawn = x.new(4).exponential_()
        known = -1.0 if y.all() else float(drawn[2])  # a replay needs the same numbers
        kept = F.dropout(x, 0.2)
        run.take(torch.log((drawn - known).abs()).sum() + run.model(kept).sum())  # bad
