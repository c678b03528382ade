"""A network in the formats of other programs: ONNX, archives of `torch.export`, safetensors."""
