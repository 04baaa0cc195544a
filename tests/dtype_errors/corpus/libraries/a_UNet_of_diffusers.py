# thread: hpcaitech/ColossalAI 2909
# expect: float32 [1, 3, 8, 8], of line #1: noisy
# expect: conv_in.weight of UNet2DModel: float16

from diffusers import UNet2DModel

unet = UNet2DModel(
    sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=2,
    attention_head_dim=2, block_out_channels=(4, 4), down_block_types=("DownBlock2D",) * 2,
    up_block_types=("UpBlock2D",) * 2,
).half()
noisy = torch.randn(1, 3, 8, 8)  #1
noise_pred = unet(noisy, torch.tensor([1])).sample  #!
