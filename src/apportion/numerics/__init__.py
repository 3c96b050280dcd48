"""Pure functions, one equation each."""
