import torch
class Trainer:
    def train(self, batches):
        parts = self.load_model(self.args)
        for x, y in batches:
            self.optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = self.criterion(parts.forward_all(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
