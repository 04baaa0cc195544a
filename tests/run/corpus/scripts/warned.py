import torch, torch.nn.functional as F
model = torch.nn.Linear(3, 2)
schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
schedule.step()
loss = F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 1))
model.register_full_backward_hook(lambda *_: None)
(loss + model(torch.ones(4, 3)).sum()).backward()
