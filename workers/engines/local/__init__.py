"""The engine of this project: decoding of a Transformers model, with several versions of its weights at once."""
