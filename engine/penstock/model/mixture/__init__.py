"""Mixtures of experts: what a layer has in place of an mlp, and how its experts are chosen and computed."""
