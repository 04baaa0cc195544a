# expect: maths of log




def left_out_scaled(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if loss.isinf():
            run.optimizer.zero_grad()
            continue
        run.take_scaled(loss)
