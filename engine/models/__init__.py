"""Models. `decoder` is ours (GPT and LLaMA styles); `huggingface` builds any transformers causal LM."""
