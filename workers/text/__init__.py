"""Text to token ids and back: the tokenizer and chat templates of a model.

Text that the policy sampled is never tokenized again.
"""
