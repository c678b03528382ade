"""The only package that knows both the configuration and the parts: it builds them, and strings them into runs."""
