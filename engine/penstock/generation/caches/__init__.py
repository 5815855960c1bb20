"""The keys and values that each layer of a step meets, wherever they lie."""
