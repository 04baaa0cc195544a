import halfstep, torch
with halfstep.autocast(dtype=torch.half):  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
