"""The accept loop and its nouns; standard library only."""
