"""Cases of bench_ops.py, one module per family of ops."""
