"""Bridges between hetkv and model libraries. Each subpackage imports its library only when it is imported itself."""
