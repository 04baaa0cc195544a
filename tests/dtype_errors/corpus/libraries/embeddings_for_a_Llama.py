# thread: embeddings-benchmark/mteb 1456
# expect: float32 [1, 4, 8]
# expect: q_proj.weight of LlamaForCausalLM: float16
# expect: of line #2
# missed: the origin

from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
)).half()
image = torch.randn(1, 2, 8)  #1
embeds = torch.cat([image, model.get_input_embeddings()(torch.tensor([[1, 2]]))], dim=1)  #2
model(inputs_embeds=embeds, attention_mask=torch.ones(1, 4))  #!
