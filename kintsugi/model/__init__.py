"""The transformer, its Hugging Face input and output, and its tokenizer.

`architecture` and `tokenizer` import no torch: the control plane reads them to estimate memory and to format prompts.
"""
