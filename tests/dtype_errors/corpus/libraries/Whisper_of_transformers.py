# thread: huggingface/transformers 47805
# expect: input_features: float32 [1, 4, 8]
# expect: encoder.conv1.weight
# expect: of line #1

from transformers import WhisperConfig, WhisperForConditionalGeneration

config = WhisperConfig(
    vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_mel_bins=4,
    max_source_positions=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1,
)
model = WhisperForConditionalGeneration(config).half()
input_features = torch.randn(1, 4, 8)  #1
model(input_features, decoder_input_ids=torch.tensor([[1, 2]]))  #!
