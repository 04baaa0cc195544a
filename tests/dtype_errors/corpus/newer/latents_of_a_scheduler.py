# thread: yifan123/flow_grpo 147
# expect: hidden_states: float32 [2, 4, 2, 2], of line #1
# expect: conv_in.weight of Denoiser: float16

class Scheduler:
    def step(self, noise, t, sample):
        sample = sample.to(torch.float32)
        prev = sample - 0.1 * noise
        return (prev,)

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(4, 4, 1)

    def forward(self, hidden_states, timestep):
        hidden_states = self.conv_in(hidden_states)  #!
        return (hidden_states * timestep,)

transformer, scheduler = Denoiser().half(), Scheduler()
latents = torch.randn(1, 4, 2, 2).half()
with torch.no_grad():
    for t in (1, 2):
        latent_model_input = torch.cat([latents] * 2)  #1
        noise = transformer(hidden_states=latent_model_input, timestep=t)[0]
        noise, text = noise.chunk(2)
        latents = scheduler.step(noise, t, latents)[0]
