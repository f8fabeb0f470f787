"""Supervised fine-tuning of an untrained policy on demonstrations."""
