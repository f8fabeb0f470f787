"""What a trainer and an engine share of a model: its loading, rows and their attention, logprobs, adapters, costs."""
