"""Score-first test-time training: documents in lanes, each with adapters of its own."""
