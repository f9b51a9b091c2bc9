"""Bodies that fuzzers found, kept by form in archives, and the fuzzers that find more: `make fuzz`."""
