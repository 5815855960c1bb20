"""Kinds of attention that need more than a field of AttentionSpec."""
