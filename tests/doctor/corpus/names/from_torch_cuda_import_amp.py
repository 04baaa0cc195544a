from torch.cuda import amp
with amp.autocast():  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
