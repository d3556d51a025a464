"""One decoder for the Llama, Qwen2, Qwen3 and Mistral families, its weights and its tokenizers."""
