"""Benchmarks: the embedding step beside other libraries' (`bench_step`), and configurations (`bench_config`)."""
