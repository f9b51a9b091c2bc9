"""The layer. Imports torch only."""
