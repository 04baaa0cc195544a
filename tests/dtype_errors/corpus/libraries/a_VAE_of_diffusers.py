# thread: zai-org/CogVLM 282: half latents, a part in float32
# expect: float16 [1, 4, 4, 4]
# expect: post_quant_conv.weight of AutoencoderKL: float32

from diffusers import AutoencoderKL

vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=4)
latents = torch.randn(1, 4, 4, 4, dtype=torch.float16)  #1
image = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]  #!
