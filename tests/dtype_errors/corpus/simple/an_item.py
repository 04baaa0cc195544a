# expect: x: float32 [2, 4]
# expect: batch['image'].T: float16 [4, 2]
# incurable

batch = {"image": half}
torch.mm(x, batch["image"].T)  #!
