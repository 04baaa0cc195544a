# expect: maths of log




def accumulated(run: Run) -> None:
    run.optimizer.zero_grad()
    for x, y in run.batches:
        for half in range(2):
            part = slice(2 * half, 2 * half + 2)
            loss = log_ratio(run.model(x[part]), y[part]) / 2
            run.note(loss)
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
