from torch.cuda import amp
with amp.autocast():  # expect: deprecated-amp fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
