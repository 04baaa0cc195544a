# expect: maths of sqrt




def stepped_by_hand_with_new_data(run: Run) -> None:
    for x, y in run.batches:
        for part in (slice(0, 2), slice(2, 4)):  # gradients are added up
            loss = (run.model(x[part]) * y[part]).square().sqrt().mean()  # bad
            loss.backward()
        run.note(loss)
        for p in run.model.parameters():
            p.data = p.data - 0.01 * p.grad
            p.grad = None
