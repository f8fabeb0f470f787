"""SmolLM2-135M-Instruct, a real pretrained model, learns to pick the largest of three numbers."""
