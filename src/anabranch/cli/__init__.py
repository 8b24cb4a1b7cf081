"""The command line. Invariant: building the parsers and `--help` import no heavy library (tests/test_cli_surface.py)."""
