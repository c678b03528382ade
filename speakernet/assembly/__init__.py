"""Builds components from the configuration and runs them; the only package that knows both."""
