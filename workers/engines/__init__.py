"""Inference engines: `engine` is the contract, `local` serves Hugging Face modules, `vllm` runs vLLM."""
