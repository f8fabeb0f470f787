"""Inference engines: `engine` is the contract, `local` serves Hugging Face modules, `scripted` needs no model."""
