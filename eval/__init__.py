"""Benchmarks and checks that run from a checkout: `python eval/NAME.py --help`."""
