"""Using a trained network: from one model file to embeddings, in Python."""
