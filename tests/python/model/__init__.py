"""The rules of the cache in plain Python, against which the tests compare hetkv."""
