"""One file per group of configuration sections; each field has its docstring, which is also its --help text."""
