# expect: maths of log

from torch import Tensor


def with_a_closure(run: Run) -> None:
    for x, y in run.batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            run.optimizer.zero_grad()
            loss = log_ratio(run.model(x), y)
            run.note(loss)
            loss.backward()
            return loss

        run.optimizer.step(closure)
