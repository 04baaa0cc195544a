# thread: lucidrains/ema-pytorch 36
# expect: tgt: float32 [2, 4], a parameter, ema_model.weight
# expect: src: bfloat16 [2, 4], a parameter
# incurable

from ema_pytorch import EMA

model = nn.Linear(4, 2)
ema = EMA(model, beta=0.9, update_after_step=0, update_every=1)
ema.update()
model.bfloat16()
ema.update()  #!
