"""From list files to batches: lists, audio, packed corpora, augmentation, samplers, loaders."""
