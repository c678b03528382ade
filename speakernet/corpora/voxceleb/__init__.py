"""VoxCeleb1 and VoxCeleb2, from archive parts or from nothing to lists or packed corpora that train."""
