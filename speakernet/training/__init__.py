"""The training loop and its parts: what moves the weights, in which precision, and what survives a kill."""
