import torch
def train(model, batches, optimizer, scaler, use_bfloat16):
    for x in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=use_bfloat16):
            loss = model(x)
        if use_bfloat16:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
