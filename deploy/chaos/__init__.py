"""The chaos run: the real programs in network namespaces, faults of every kind, and an independent account of every group."""
