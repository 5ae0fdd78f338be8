"""What a mode does at a Site: providers, from rules to quantized products."""
