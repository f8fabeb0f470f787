"""Inference engines: `base` is the contract, `local` serves Hugging Face modules, `scripted` needs no model."""
