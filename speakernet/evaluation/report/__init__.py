"""The page of a result: what it shows, how it looks, and the arrays it is drawn from."""
