"""SmolLM2-135M-Instruct, a real pretrained model, trained to select the largest of three numbers."""
